#!/usr/bin/env bash
# The measurements of results/dgp.md, side by side on one GPU.
#   results/dgp.sh DATA OUT CHAIN...     DATA holds cifar-10-batches-bin/ and lpips/; CHAIN is a function below
# What is stopped goes on where it was.
. "$(dirname "$0")/study.sh"

costs() { # Tables 3 and 4, and the ratios of selection and Soteria
  python3 benchmarks/defenses.py --device cuda --json "$out/done/defenses.json" >"$out/defenses.log" 2>&1
  study dgp-table3
  study dgp-table4
}
trained() { # trained FOLDER DEFENSE [SETTINGS...]: one column of Table 1's accuracies
  local folder=$1 defense=$2
  shift 2
  study_into "$folder" dgp-table1 --set steps=training --set "defenses=$defense" "$@"
}
accuracy() { # at the paper's schedule, side by side
  trained train-none none &
  trained train-noise noise &
  trained train-top-k top-k+error-feedback &
  trained train-dgp dgp+error-feedback &
  study_into train-dgp-alone dgp-fig4 --model resnet18 --set steps=training --set defenses=dgp &
  wait
}
shorter() { # the other columns, and Table 2's, in 30 epochs, beside the baseline and DGP in as many
  for defense in none dgp+error-feedback ats precode outpost; do
    trained "short-$defense" $defense --set epochs=30 --set learning_rate=.01
  done
  study_into short-table2 dgp-table2 --set steps=training --set epochs=30 --set learning_rate=.01
}
soteria() { # a Jacobian for every step of every user: a tenth of the pictures, beside the baseline on as many
  for defense in none soteria; do
    trained "few-$defense" $defense --set epochs=10 --set learning_rate=.01 --set examples=6000
  done
}
privacy() { # Table 1's attacks on every defense, plain and adaptive, side by side; then Tables 2 and 5
  study_into privacy-others dgp-table1 --set steps=rob,r-gap &
  for some in none,ats,soteria,precode noise,outpost top-k dgp; do
    study_into "privacy-$some" dgp-table1 --set steps=ig,gi --set defenses=$some &
  done
  wait
  study_into table2 dgp-table2 --set steps=rob,ig
  study dgp-table5
}

for chain in "$@"; do $chain & done
wait
