# What the scripts of measurements share; they source it with the arguments DATA OUT CHAIN...
set -u
data=$1 out=$2
shift 2
mkdir -p "$out/done"
export OMP_NUM_THREADS=1 SECATEUR_DATA=$data

keep() { # keep FOLDER [NAME]: the rows with their provenance; COMMIT is that of the code, where this is no checkout
  python3 -m secateur report "$out/$1" --rows "$out/done/${2:-$1}.jsonl.xz" ${COMMIT:+--commit "$COMMIT"}
}
study() { # study NAME ARGUMENTS...
  study_into "$1" "$@"
}
study_into() { # study_into FOLDER NAME ARGUMENTS...
  local folder=$1 name=$2 begun=$SECONDS
  shift 2
  python3 -m secateur reproduce "$name" --scale full --device cuda --out "$out/$folder" "$@" >>"$out/$folder.log" 2>&1
  echo "$folder: exit $? after $((SECONDS - begun)) s" >>"$out/times"
  keep "$folder"
  cp "$out/$folder/table.md" "$out/done/$folder.md"
}
side_by_side() { # side_by_side FUNCTION...: AT_ONCE (4) at a time, in this order
  for each in "$@"; do
    $each &
    while [ "$(jobs -rp | wc -l)" -ge "${AT_ONCE:-4}" ]; do wait -n; done
  done
  wait
}
