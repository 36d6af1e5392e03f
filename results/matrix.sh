#!/usr/bin/env bash
# The matrix on one GPU: results/matrix.sh DATA OUT, its parts side by side, AT_ONCE (12) at a time, three seeds.
# `secateur report OUT/matrix-* --out matrix.html` joins the parts into one page. A part that was killed resumes.
. "$(dirname "$0")/study.sh"

part() { # part MEASURE NETWORK SEED
  local images=--no-images
  [ "$3" = 0 ] && [ "$1" != training ] && [ "$1" != compression ] && images= # the page shows the first seed's pictures
  study_into "matrix-$1-$2-$3" matrix --data cifar10 --seeds "$3," $images --set networks="$2" --set measures="$1"
}
for measures in "inversion training" "active compression"; do
  for seed in 0 1 2; do
    for network in conv-2 resnet18-w16; do
      for measure in $measures; do
        part "$measure" "$network" "$seed" &
        while [ "$(jobs -rp | wc -l)" -ge "${AT_ONCE:-12}" ]; do wait -n; done
      done
    done
  done
done
wait
