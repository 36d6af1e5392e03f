#!/usr/bin/env bash
# The measurements of results/mapp.md on one GPU, in the order in which they matter.
#   results/mapp.sh DATA OUT CHAIN...     DATA holds cifar-10-batches-bin/; CHAIN is a function below, or all
# Chains that are named run one after another: each stacks its federations, and one stack fills the GPU.
# What is stopped goes on where it was.
. "$(dirname "$0")/study.sh"

among() { # among STUDY...: in one folder, so that a federation of two studies runs once
  study_into mapp "mapp-$@"
  cp "$out/mapp/table.md" "$out/done/mapp-$1.md"
}
rules() { # Table 5, and of the same federations Table 2 and Fig. 4; a seed at a time, so that each is there when it ends
  for seed in 0 1 2; do among table5 --seeds "$seed,"; done
  among table5 --seeds 0,1,2
}
coupling() { among table6 --seeds 0,1,2; }                  # Table 6
large() { # Fig. 3 and Table 4, a seed at a time
  for seeds in 0, 0,1 0,1,2; do among fig3 --set large=0+1+2+5+9 --seeds $seeds; done
}
sizes() { among fig1; }                                     # Table 3 with five draws, and Fig. 1
attackers() { among attackers --seeds 1; }                  # LiRA and RMIA on FedAvg, HeteroFL and MaPP-FL
joined() { among joined --seeds 1; }                        # MaPP-FL with DGP's upload, and with withheld weights
bare() {                                                    # Table 5 without crops and flips
  study_into mapp-table5-bare mapp-table5 --set augment=false --seeds 1
}
all() { rules && coupling && large && sizes && attackers && joined && bare; }

for chain in "$@"; do $chain; done
