#!/usr/bin/env bash
# The measurements of results/dgp.md, side by side on one GPU.
#   results/dgp.sh DATA OUT CHAIN...     DATA holds cifar-10-batches-bin/ and lpips/; CHAIN is a function below
# What is stopped goes on where it was.
set -u
data=$1 out=$2
shift 2
mkdir -p "$out/done"
export OMP_NUM_THREADS=1 SECATEUR_DATA=$data

study() { # study NAME ARGUMENTS...
  study_into "$1" "$@"
}
study_into() { # study_into FOLDER NAME ARGUMENTS...
  local folder=$1 name=$2 begun=$SECONDS
  shift 2
  python3 -m secateur reproduce "$name" --scale full --device cuda --out "$out/$folder" "$@" >"$out/$folder.log" 2>&1
  echo "$folder: exit $? after $((SECONDS - begun)) s" >>"$out/times"
  cp "$out/$folder/results.jsonl" "$out/done/$folder.jsonl"
}

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
shorter() { # the other columns, in 30 epochs
  for defense in ats precode outpost; do
    trained "train-$defense" $defense --set epochs=30 --set learning_rate=.01
  done
}
privacy() { # Table 1's attacks on every defense, plain and adaptive; then Tables 2 and 5
  study_into privacy dgp-table1 --set steps=rob,r-gap,ig,gi
  study_into table2 dgp-table2 --set steps=rob,ig
  study dgp-table5
}

for chain in "$@"; do $chain & done
wait
