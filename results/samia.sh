#!/usr/bin/env bash
# The measurements of results/samia.md: five chains of audits that run side by side on one GPU, most wanted first.
#   results/samia.sh DATA OUT     DATA holds cifar-10-batches-bin/ and location/, OUT gets a folder per chain
# A chain that is stopped goes on where it was. Each finished audit leaves OUT/done/NAME.jsonl.
set -u
data=$1 out=$2
mkdir -p "$out/done"
export OMP_NUM_THREADS=1 SECATEUR_DATA=$data
cifar="--model resnet18-pool --data cifar10 --device cuda --set way=sequential"
location="--model mlp --data location --device cuda --set seeds=[0,1,2,3,4]"
all=conf,xent,entropy,mentr,top1-conf,correctness,nn,top3-nn,nn-cls,blindmi,samia,lira,rmia
some=conf,mentr,nn-cls,samia,lira,rmia

audit() { # audit FOLDER NAME ARGUMENTS...
  local folder=$1 name=$2; shift 2
  local begun=$SECONDS
  python3 -m secateur audit --out "$out/$folder" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - begun)) s" >>"$out/times"
  cp "$out/$folder/results.jsonl" "$out/done/$name.jsonl"
}

(audit grid grid $cifar --pruner l1-unstructured,l1-structured,l2-structured,slimming --sparsity .5,.7,.9 --attack $all) &
(for adaptive in no-adaptive adaptive; do
   audit defended "defended-l1-$adaptive" $cifar --pruner l1-unstructured --sparsity .6 --defense basic,ppb,adv --attack $some --$adaptive
 done
 for adaptive in no-adaptive adaptive; do
   audit defended "defended-others-$adaptive" $cifar --pruner l1-structured,l2-structured,slimming --sparsity .6 --defense basic,ppb,adv --attack $some --$adaptive
 done) &
(audit private dp-no-adaptive $cifar --pruner l1-unstructured --sparsity .6 --defense dp-sgd --attack $some
 audit private dp-adaptive $cifar --pruner l1-unstructured --sparsity .6 --defense dp-sgd --attack $some --adaptive) &
(audit seeds seeds-l1 $cifar --set seeds=[1,2] --pruner l1-unstructured --sparsity .5 --attack $all
 for adaptive in no-adaptive adaptive; do
   audit seeds "seeds-ppb-$adaptive" $cifar --set seeds=[1,2] --pruner l1-unstructured --sparsity .6 --defense basic,ppb --attack $some --$adaptive
 done) &
(audit location location-basic $location --pruner l1-unstructured --sparsity .5,.6,.7,.8,.9 --attack $all,label-only
 for adaptive in no-adaptive adaptive; do
   audit location "location-$adaptive" $location --pruner l1-unstructured --sparsity .7 --defense basic,ppb:strength=4,ppb:strength=16,adv,dp-sgd --attack $all --$adaptive
 done) &
wait
