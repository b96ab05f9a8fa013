#!/bin/sh
# Two real corpora mixed 82/18 by tokens: fetched, a vocabulary learnt from them,
# near-duplicates dropped, streams prepared, looked at, trained on.
#   scripts/mixture.sh PROGRAM
set -eu
cd "$(dirname "$0")/.."
program=$1
runs=runs/mixture
ranks=$(nproc)
[ "$ranks" -gt 2 ] && ranks=2
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export OMPI_MCA_btl_vader_single_copy_mechanism=none

scripts/corpus.sh "$runs/corpora/linux-doc" linux-doc
scripts/corpus.sh "$runs/corpora/anarchism"
[ -f "$runs/vocabulary.tiktoken" ] ||
  "$program" tokenize --train 4096 --output "$runs/vocabulary.tiktoken" "$runs/corpora/linux-doc" "$runs/corpora/anarchism"
"$program" prepare configs/mixture.yaml
"$program" inspect "$runs/train.tokens"
mpirun -np "$ranks" --oversubscribe "$program" train configs/mixture.yaml --set run.folder="$runs/run"
"$program" generate "$runs/run" --prompt "The kernel " --tokens 80 --seed 7
