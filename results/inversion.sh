#!/usr/bin/env bash
# The measurements of results/inversion.md, side by side on one GPU and its host's processors.
#   results/inversion.sh DATA OUT CHAIN...     DATA holds cifar-10-batches-bin/ and lpips/; CHAIN is a function below
# What is stopped goes on where it was. Each run leaves OUT/done/NAME.jsonl.xz.
. "$(dirname "$0")/study.sh"
cifar="--data cifar10 --device cuda --targets 20"

invert() { # invert NAME ARGUMENTS...
  local name=$1 begun=$SECONDS
  shift
  python3 -m secateur invert --out "$out/$name" $cifar "$@" >"$out/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - begun)) s" >>"$out/times"
  keep "$name"
}
measure() { # measure NAME ARGUMENTS...: a benchmark
  local name=$1 begun=$SECONDS
  shift
  python3 benchmarks/invert.py --json "$out/done/$name.json" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - begun)) s" >>"$out/times"
}

speed() { # alone on the GPU: ratios to the plain loop
  measure speed --device cuda --models lenet-zhu cnn6 vgg11-bn resnet18 --targets 20 64 --iterations 60
}
networks() { # IG on four untrained networks
  for model in resnet18 vgg11-bn cnn6 lenet-zhu; do
    invert "ig-$model" --model $model --attack ig,ig-geiping,ig-dgp
  done
}
attacks() { # the others, each on the network that its source or the paper attacks it on
  invert rob --model resnet18 --batch-size 9 --attack rob
  invert rgap --model cnn6 --attack r-gap
  invert gi --model resnet18 --attack gi-dgp:iterations=2500,gi:iterations=2500
  invert dlg --model lenet-zhu --attack dlg,idlg
  invert sgi --model cnn6 --local-steps 1 --learning-rate .1 --attack sgi,gi-priprune
}
gi() { # what its BatchNorm prior does on an untrained network: told the batch's own statistics, and without the prior
  invert gi-told --model resnet18 --set statistics=true --attack gi-dgp:iterations=2500
  invert gi-free --model resnet18 --attack gi-dgp:batchnorm=0:iterations=2500,gi-dgp:batchnorm=0:iterations=2500:scale=1
}
prior() { # a generator of the project's own, then GGL through it
  invert ggl --model lenet-zhu --set generator_steps=3000 --attack ggl,ggl:search=gradient
}
peers() { # the same targets and iterations by breaching: two networks on processors, two on the GPU
  measure peer-lenet-zhu --quality --device cpu --models lenet-zhu &
  measure peer-cnn6 --quality --device cpu --models cnn6 &
  measure peer-vgg11-bn --quality --device cuda --models vgg11-bn &
  measure peer-resnet18 --quality --device cuda --models resnet18 &
  wait
}

for chain in "$@"; do $chain & done
wait
