#!/usr/bin/env bash
# The measurements of results/priprune.md, AT_ONCE (4) side by side on one GPU.
#   results/priprune.sh DATA OUT CHAIN...     DATA holds MNIST/raw/, QMNIST/raw/ and cifar-10-batches-bin/; CHAIN is a
#   function below, in the order in which they are wanted, or a federation of one (rate_none, base_snip_priprune, ...)
# What is stopped goes on where it was. A federation under PriPrune holds 110 MB a client, 21 GB here, and as much in a
# checkpoint. SEEDS (1), ROUNDS (20000), ATTACKED (20 rounds of a federation), ITERATIONS (1000 of each attack, the
# paper has 10000), ATTACK_RATE (.1, the paper has .01: as long a way in fewer steps) and COVERAGE=1 (what is withheld
# does not count as 0 in the average) may be set; what is less than the paper's is in the tables' heads.
. "$(dirname "$0")/study.sh"

federations() { # federations FOLDER STUDY SETTINGS...
  local folder=$1 name=$2
  shift 2
  study_into "$folder" "priprune-$name" --seeds "${SEEDS:-1}" --set rounds="${ROUNDS:-20000}" \
    --set attacked="${ATTACKED:-20}" --set iterations="${ITERATIONS:-1000}" --set attack_rate="${ATTACK_RATE:-.1}" \
    ${COVERAGE:+--set coverage=true} "$@"
}
mnist() { federations "$@" --data qmnist; }

# 1: Fig. 8, PruneFL with six fixed rates and with PriPrune, MNIST by writer
rate_none() { mnist fig8-none fig8 --set defenses=none; }
rate_priprune() { mnist fig8-priprune fig8 --set defenses=priprune; }
for rate in 0.1 0.2 0.3 0.4 0.5 0.6; do
  eval "rate_${rate#0.}() { mnist fig8-$rate fig8 --set defenses=pseudo-largest:rate=$rate; }"
done
rates() { side_by_side rate_priprune rate_none rate_6 rate_3 rate_1 rate_5 rate_4 rate_2; }

# 2: Table 2 on MNIST by writer (PruneFL is in Fig. 8), and Fig. 9 of the same federations
for base in feddst synflow snip; do
  for defense in none priprune; do
    eval "base_${base}_$defense() { mnist table2-$base-$defense table2 --set bases=$base --set defenses=$defense; }"
  done
done
bases() { for base in feddst synflow snip; do side_by_side base_${base}_none base_${base}_priprune; done; }

# 3: Table 2 on CIFAR-10 with VGG-11 in batches of 1; or cifar20, which is ours: 2000 rounds in batches of 20
cifar() { federations cifar table2 --data cifar10; }
for defense in none priprune; do
  eval "cifar20_$defense() { ROUNDS=2000 federations cifar20-$defense table2 --data cifar10 --set batch_size=20 --set defenses=$defense; }"
done
cifar20() { side_by_side cifar20_priprune cifar20_none; }

# 4: Fig. 3, GI and SGI by base pruning and rate, with the dense broadcast, where they differ; then A3, A2 and A1
for base in prunefl snip feddst random synflow; do
  eval "attacks_$base() { mnist fig3-$base fig3 --set broadcast=dense --set bases=$base; }"
done
attacks() { side_by_side attacks_prunefl attacks_snip attacks_feddst attacks_random attacks_synflow; }
appendix() {
  for name in figa3 figa2 figa1; do mnist figa $name; done
}
# 5: Fig. 6, real and pseudo-pruning (the undefended one is in Fig. 8), then the mixes of A4 and the rates of A5
for rule in largest random mix pseudo-largest pseudo-random pseudo-mix; do
  eval "rule_${rule/-/_}() { mnist fig6-$rule fig6 --set defenses=$rule; }"
done
rules() { side_by_side rule_largest rule_random rule_mix rule_pseudo_largest rule_pseudo_random rule_pseudo_mix; }
mixes() {
  for name in figa4 figa5; do mnist figa4 $name; done
}
theory() { # 6: Figs. 2, 4 and 5
  for name in fig2 fig4 fig5; do mnist $name $name; done
}
# what the paper leaves open, a federation each; beside rate_priprune, and with COVERAGE=1 for the average
for reading in alpha=0.1 alpha=0.9 step=0.001 step=0.1 temperature=1 temperature=20 normalise=global; do
  eval "reading_${reading%=*}_${reading##*[=.]}() { mnist alpha-$reading alpha --set defenses=priprune:$reading; }"
done
ours() { # 7: what the paper leaves unstated, all defenses on one axis, and Table A1
  for name in alpha defenses tablea1; do mnist $name $name; done
}
squares() { mnist squares squares; } # 8: who reads PruneFL's squared gradients, and a PruneFL that does not send them
speed() { # rounds a second, alone on the machine
  python3 benchmarks/federate.py --device cuda --json "$out/done/federate.json" >"$out/federate.log" 2>&1
}

side_by_side "$@"
