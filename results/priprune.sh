#!/usr/bin/env bash
# The measurements of results/priprune.md, chain by chain on one GPU.
#   results/priprune.sh DATA OUT CHAIN...     DATA holds MNIST/raw/, QMNIST/raw/ and cifar-10-batches-bin/; CHAIN is a
#   function below, in the order in which they are wanted; several run side by side
# What is stopped goes on where it was. A federation under PriPrune holds 110 MB a client, 21 GB here, and as much in a
# checkpoint, twice while it is written: of the chains rates, bases, ours and cifar run as many at once as the disk
# holds. SEEDS (1), ROUNDS (20000), ITERATIONS (10000, of each attack) and ATTACKED (20 rounds of a federation) may be
# set; what is less than the paper's is in the tables' heads.
set -u
data=$1 out=$2
shift 2
mkdir -p "$out/done"
export OMP_NUM_THREADS=1 SECATEUR_DATA=$data
seeds=${SEEDS:-1} rounds=${ROUNDS:-20000} iterations=${ITERATIONS:-10000} attacked=${ATTACKED:-20}

study() { # study NAME FOLDER ARGUMENTS...; studies that share federations share a folder
  local name=$1 folder=$2 begun=$SECONDS
  shift 2
  python3 -m secateur reproduce "priprune-$name" --scale full --device cuda --seeds "$seeds" --out "$out/$folder" \
    --set rounds="$rounds" --set iterations="$iterations" --set attacked="$attacked" "$@" >"$out/$name-$folder.log" 2>&1
  echo "$name ($folder): exit $? after $((SECONDS - begun)) s" >>"$out/times"
  for file in results.jsonl table.md table.jsonl; do cp "$out/$folder/$file" "$out/done/$name-$folder-$file"; done
}

speed() { # rounds a second of Conv-2 and VGG-11, and whether VGG-11 learns at all at this rate and loss
  python3 benchmarks/federate.py --device cuda --json "$out/done/federate.json" >"$out/federate.log" 2>&1
  rounds=1000 iterations=100 attacked=2 study table2 probe-cifar --data cifar10
}
rates() { # 1: Fig. 8, PruneFL with six fixed rates and with PriPrune, MNIST by writer
  study fig8 mnist-fig8 --data qmnist
}
bases() { # 2: Table 2 on MNIST by writer, and Fig. 9 of the same federations
  study table2 mnist-table2 --data qmnist
  study fig9 mnist-table2 --data qmnist
}
cifar() { # 3: Table 2 on CIFAR-10 with VGG-11 in batches of 1, and Fig. 9 of the same federations
  study table2 cifar --data cifar10
  study fig9 cifar --data cifar10
}
cifar20() { # 3, or this, which is ours: 2000 rounds in batches of 20
  rounds=2000 study table2 cifar20 --data cifar10 --set batch_size=20
  rounds=2000 study fig9 cifar20 --data cifar10 --set batch_size=20
}
attacks() { # 4: Fig. 3, GI and SGI by base pruning and rate, then A3, A2 and A1 of MNIST by writer
  study fig3 mnist-fig3 --data qmnist
  study figa3 mnist-fig3 --data qmnist
  study figa2 mnist-fig3 --data qmnist
  study figa1 mnist-fig3 --data qmnist
}
rules() { # 5: Fig. 6, real and pseudo-pruning, then the mixes of A4 and the rates of A5
  study fig6 mnist-fig6 --data qmnist
  study figa4 mnist-fig6 --data qmnist
  study figa5 mnist-fig6 --data qmnist
}
theory() { # 6: Figs. 2, 4 and 5
  study fig2 mnist-fig2 --data qmnist
  study fig4 mnist-fig4 --data qmnist
  study fig5 mnist-fig5 --data qmnist
}
ours() { # 7: what the paper leaves unstated, all defenses on one axis, and Table A1
  study alpha mnist-alpha --data qmnist
  study defenses mnist-defenses --data qmnist
  study tablea1 mnist-tablea1 --data qmnist
}

for chain in "$@"; do $chain & done
wait
