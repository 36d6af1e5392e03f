#!/usr/bin/env bash
# The measurements of results/dgp.md, side by side on one GPU.
#   results/dgp.sh DATA OUT CHAIN...     DATA holds cifar-10-batches-bin/ and lpips/; CHAIN is a function below
# What is stopped goes on where it was.
. "$(dirname "$0")/study.sh"

costs() { # Tables 3 and 4, and the ratios of selection and Soteria; alone on the machine
  python3 benchmarks/defenses.py --device cuda --json "$out/done/defenses.json" >"$out/defenses.log" 2>&1
  study dgp-table3
  study dgp-table4
}
trained() { # trained FOLDER DEFENSE [SETTINGS...]: one column of Table 1's accuracies
  local folder=$1 defense=$2
  shift 2
  study_into "$folder" dgp-table1 --set steps=training --set "defenses=$defense" "$@"
}
train_none() { trained train-none none; }                                # at the paper's schedule
train_noise() { trained train-noise noise; }
train_top_k() { trained train-top-k top-k+error-feedback; }
train_dgp() { trained train-dgp dgp+error-feedback; }
train_dgp_alone() { # without error feedback
  study_into train-dgp-alone dgp-fig4 --data cifar10 --model resnet18 --set steps=training --set defenses=dgp
}
# the other columns in a tenth of the epochs, beside the baseline and DGP in as many; and Table 2's shares in as many
for defense in none dgp+error-feedback ats precode outpost; do
  eval "short_${defense%%+*}() { trained short-$defense $defense --set epochs=10 --set learning_rate=.01; }"
done
short() { for each in none dgp ats precode outpost; do short_$each; done; }
shares() { # shares FOLDER [SETTINGS...]
  local folder=$1
  shift
  study_into "$folder" dgp-table2 --set steps=training --set epochs=10 --set learning_rate=.01 "$@"
}
short_table2() { shares short-table2; }
short_ratios() { # its two by k1 / k2 alone
  shares short-ratios --set defenses=dgp:k1=0.1:k2=0.7+error-feedback,dgp:k1=0.2:k2=0.6+error-feedback
}
few() { trained "few-$1" "$1" --set epochs=5 --set learning_rate=.01 --set examples=6000; }
few_none() { few none; }
few_soteria() { few soteria; } # a Jacobian for every step of every user: a tenth of the pictures, beside the baseline
noise_one_user() { trained noise-one-user none,noise --set users=1 --set epochs=10 --set learning_rate=.01; }
noise_fast() { trained noise-fast none,noise --set epochs=10 --set learning_rate=.1; } # ten users
privacy() { # Table 1's attacks on every defense, plain and adaptive, side by side; then Table 2
  study_into privacy-others dgp-table1 --set steps=rob,r-gap &
  for some in none,ats,soteria,precode noise,outpost top-k dgp; do
    study_into "privacy-$some" dgp-table1 --set steps=ig,ig-smooth --set defenses=$some &
  done
  wait
  study_into table2 dgp-table2 --set steps=rob
}
gi() { # gi DEFENSES: Table 1 under GI; of those who know of the defense the ones that saw most under IG
  study_into "gi-$1" dgp-table1 --set steps=gi --set "defenses=$1" --set adaptive=support,layer
}
gi_bare() { gi none,noise,outpost; }
gi_top_k() { gi top-k,ats; }
gi_dgp() { gi dgp,precode; }
gi_soteria() { gi soteria; }
precode() { study_into ig-precode dgp-table1 --set steps=ig,ig-smooth --set defenses=precode; } # and by who leaves its layer out
ratios() { study_into table2-ig dgp-table2 --set steps=ig,ig-smooth; }                          # Table 2 under IG and ig-smooth
networks() { study dgp-table5; }                                                      # Table 5

side_by_side "$@"
