#!/usr/bin/env bash
# The measurements of results/samia.md: chains of audits, most wanted first, that may run side by side on one GPU.
#   results/samia.sh DATA OUT CHAIN...     DATA holds cifar-10-batches-bin/ and location/; CHAIN is a function below
# A chain that is stopped goes on where it was. Each finished audit leaves OUT/done/NAME.jsonl.
set -u
data=$1 out=$2
shift 2
mkdir -p "$out/done"
export OMP_NUM_THREADS=1 SECATEUR_DATA=$data
cifar="--model resnet18-pool --data cifar10 --device cuda --set way=sequential"
location="--model mlp --data location --device cuda"
all=conf,xent,entropy,mentr,top1-conf,correctness,nn,top3-nn,nn-cls,blindmi,samia,lira,rmia
some=conf,mentr,nn-cls,samia,lira,rmia

audit() { # audit FOLDER NAME ARGUMENTS...
  local folder=$1 name=$2 begun=$SECONDS
  shift 2
  python3 -m secateur audit --out "$out/$folder" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - begun)) s" >>"$out/times"
  cp "$out/$folder/results.jsonl" "$out/done/$name.jsonl"
}

grid() { # four pruners under basic
  for sparsity in .5 .7 .9; do
    audit grid "grid-$sparsity" $cifar --pruner l1-unstructured,l1-structured,l2-structured,slimming --sparsity $sparsity --attack $all
  done
}
defended() { # sparsity .6 under basic, ppb and adv
  for pruner in l1-unstructured l1-structured l2-structured slimming; do
    for adaptive in no-adaptive adaptive; do
      audit defended "defended-$pruner-$adaptive" $cifar --pruner $pruner --sparsity .6 --defense basic,ppb,adv --attack $some --$adaptive
    done
  done
}
private() { # sparsity .6 under dp-sgd
  for adaptive in no-adaptive adaptive; do
    audit private "private-$adaptive" $cifar --pruner l1-unstructured --sparsity .6 --defense dp-sgd --attack $some --$adaptive
  done
}
seeds() { # two more seeds of what matters most
  audit seeds seeds-l1 $cifar --set seeds=[1,2] --pruner l1-unstructured --sparsity .5 --attack $all
  for adaptive in no-adaptive adaptive; do
    audit seeds "seeds-ppb-$adaptive" $cifar --set seeds=[1,2] --pruner l1-unstructured --sparsity .6 --defense basic,ppb --attack $some --$adaptive
  done
}
location() { # Location-30, five seeds
  audit location location-basic $location --set seeds=[0,1,2,3,4] --pruner l1-unstructured --sparsity .5,.6,.7,.8,.9 --attack $all,label-only
  for adaptive in no-adaptive adaptive; do
    audit location "location-$adaptive" $location --set seeds=[0,1,2,3,4] --pruner l1-unstructured --sparsity .7 --defense basic,ppb:strength=4,ppb:strength=16,adv,dp-sgd --attack $some --$adaptive
  done
}

for chain in "$@"; do $chain & done
wait
