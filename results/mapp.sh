#!/usr/bin/env bash
# The measurements of results/mapp.md on one GPU, in the order in which they matter.
#   results/mapp.sh DATA OUT CHAIN...     DATA holds cifar-10-batches-bin/; CHAIN is a function below, or all
# Chains that are named run one after another. Within one, seeds run side by side, each in a folder of its own: while one
# is attacked, which leaves most of a GPU idle, another trains. What is stopped goes on where it was.
. "$(dirname "$0")/study.sh"

among() { # among FOLDER STUDY SETTINGS...: studies of one folder share the federations that they have in common
  study_into "$1" "mapp-$2" "${@:3}"
  for kind in md jsonl.xz; do mv "$out/done/$1.$kind" "$out/done/$1-$2.$kind"; done
}
by_seed() { # by_seed STUDY SETTINGS...: and of all seeds one table
  for seed in 0 1 2; do among "seed-$seed" "$@" --seeds "$seed," & done
  wait
  [ -d "$out/seeds" ] || cp -r "$out/seed-0" "$out/seeds"
  cp -n "$out"/seed-?/artifacts/* "$out/seeds/artifacts/"
  among seeds "$@" --seeds 0,1,2
}
rules() { by_seed table5; }                                 # Table 5, and of the same federations Table 2 and Fig. 4
large() { by_seed fig3 --set large=0+1+2+5+9; }             # Fig. 3 and Table 4
coupling() { by_seed table6; }                              # Table 6
sizes() { # Table 3 with five draws, and Fig. 1; the widest network by itself, as it takes as long as the others
  among sizes fig1 --set units=8+16+32
  among sizes fig1
}
attackers() { by_seed attackers --set examples=20000 --set shadow_federations=4; } # LiRA and RMIA, three rules
joined() { among beyond joined --seeds 1; }                 # MaPP-FL with DGP's upload, and with withheld weights
bare() { # Table 5 and Table 3 without crops and flips
  among bare table5 --set augment=false --seeds 1
  among bare fig1 --set augment=false
}
all() { rules && large && coupling && sizes && attackers && joined && bare; }

for chain in "$@"; do $chain; done
