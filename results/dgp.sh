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
  local name=$1 begun=$SECONDS
  shift
  python3 -m secateur reproduce "$name" --scale full --device cuda --out "$out/$name" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - begun)) s" >>"$out/times"
  cp "$out/$name/results.jsonl" "$out/done/$name.jsonl"
}

costs() { # Tables 3 and 4, and the ratios of selection and Soteria
  python3 benchmarks/defenses.py --device cuda --json "$out/done/defenses.json" >"$out/defenses.log" 2>&1
  study dgp-table3
  study dgp-table4
}
privacy() { # Table 1's attacks on every defense, then Tables 2 and 5
  study dgp-table1
  study dgp-table2
  study dgp-table5
}

for chain in "$@"; do $chain & done
wait
