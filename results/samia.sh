#!/usr/bin/env bash
# The measurements of results/samia.md, side by side on one GPU and its host's processors.
#   results/samia.sh DATA OUT CHAIN...     DATA holds cifar-10-batches-bin/ and location/; CHAIN is a function below
# What is stopped goes on where it was. Each audit leaves OUT/done/NAME.jsonl.xz.
. "$(dirname "$0")/study.sh"
cifar="--model resnet18-pool --data cifar10 --device cuda --set execution=sequential"
location="--model mlp --data location --device cpu"
all=conf,xent,entropy,mentr,top1-conf,correctness,nn,top3-nn,nn-cls,blindmi,samia,lira,rmia
some=conf,mentr,nn-cls,samia,lira,rmia

audit() { # audit FOLDER NAME ARGUMENTS...
  local folder=$1 name=$2 begun=$SECONDS
  shift 2
  python3 -m secateur audit --out "$out/$folder" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - begun)) s" >>"$out/times"
  keep "$folder" "$name"
}

cifar() { # the victim, its shadows and the first cell; then three chains that begin from them, and two more seeds
  audit grid first $cifar --pruner l1-unstructured --sparsity .5 --attack $all
  for chain in defended private; do
    [ -d "$out/$chain" ] || cp -r "$out/grid" "$out/$chain"
  done
  grid &
  private &
  defended
  seeds
  wait
}
grid() { # four pruners under basic
  audit grid grid $cifar --pruner l1-unstructured,l1-structured,l2-structured,slimming --sparsity .5,.7,.9 --attack $all
}
defended() { # sparsity .6 under basic, ppb and adv
  for adaptive in no-adaptive adaptive; do
    audit defended "defended-$adaptive" $cifar --pruner l1-unstructured --sparsity .6 --defense basic,ppb,adv --attack $some --$adaptive
  done
}
private() { # sparsity .6 under dp-sgd
  for adaptive in no-adaptive adaptive; do
    audit private "private-$adaptive" $cifar --pruner l1-unstructured --sparsity .6 --defense dp-sgd --attack $some --$adaptive
  done
}
rest() { # what the first run on a GPU did not reach, from originals of its own, and the control: fine-tuning with one weight in a thousand pruned
  audit rest rest $cifar --pruner l2-structured --sparsity .9,.7 --attack $all
  audit rest control $cifar --pruner l1-unstructured --sparsity .001 --attack $all
}
slimming() { # its originals are trained with its penalty
  audit slimming slimming $cifar --pruner slimming --sparsity .5,.7,.9 --attack $all
}
seed_2() {
  one_seed 2
}
seeds() { # two more seeds of what matters most
  for seed in 1 2; do one_seed $seed; done
}
one_seed() {
  local seed=$1
  audit "seed-$seed" "seed-$seed" $cifar --set "seeds=[$seed]" --pruner l1-unstructured --sparsity .5 --attack $all
  for adaptive in no-adaptive adaptive; do
    audit "seed-$seed" "seed-$seed-ppb-$adaptive" $cifar --set "seeds=[$seed]" --pruner l1-unstructured --sparsity .6 --defense basic,ppb --attack $some --$adaptive
  done
}
location() { # Location-30, five seeds, a process each
  for seed in 0 1 2 3 4; do
    one_location $seed &
  done
  wait
}
one_location() {
  local seed=$1
  audit "location-$seed" "location-$seed" $location --set "seeds=[$seed]" --pruner l1-unstructured --sparsity .5,.6,.7,.8,.9 --attack $all,label-only
  for adaptive in no-adaptive adaptive; do
    audit "location-$seed" "location-$seed-$adaptive" $location --set "seeds=[$seed]" --pruner l1-unstructured --sparsity .7 --defense basic,ppb:strength=4,ppb:strength=16,adv,dp-sgd --attack $some --$adaptive
  done
}
location_adaptive() { # of Location-30 only the last, five seeds, a process each
  for seed in 0 1 2 3 4; do
    audit "location-$seed" "location-$seed-adaptive" $location --set "seeds=[$seed]" --pruner l1-unstructured --sparsity .7 --defense basic,ppb:strength=4,ppb:strength=16,adv,dp-sgd --attack $some --adaptive &
  done
  wait
}

for chain in "$@"; do $chain & done
wait
