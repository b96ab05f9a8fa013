#!/bin/sh
# The demonstration: the same small Llama learns English under `bf16` and under
# `mxfp4-row-sr`, matched in everything but the route.  One rank of the second
# run is killed on the way; the same command goes on, to the bit.
#   scripts/demo.sh PROGRAM
set -eu
cd "$(dirname "$0")/.."
program=$1
runs=runs/demo
ranks=$(nproc)
[ "$ranks" -gt 2 ] && ranks=2

launch="mpirun -np $ranks --oversubscribe"
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export OMPI_MCA_btl_vader_single_copy_mechanism=none

say() { printf '\n== %s\n' "$*"; }

rm -rf "$runs"
say "real text: corpus, tokens, held-out split"
scripts/corpus.sh "$runs/corpus"
"$program" prepare configs/demo-bf16.yaml

say "route bf16"
$launch "$program" train configs/demo-bf16.yaml --set run.folder="$runs/bf16"

say "route mxfp4-row-sr: everything else is the same; one rank will be killed on the way"
kill_after=$(awk '/^checkpoint:/ {here = 1} here && /every:/ {print $2 + $2 / 2; exit}' configs/demo.yaml)
$launch "$program" train configs/demo-mxfp4.yaml --set run.folder="$runs/mxfp4" &
job=$!
# A checkpoint is on record once it is published, which may be some updates later.
until grep -q '"kind":"checkpoint"' "$runs/mxfp4/metrics.jsonl" 2>/dev/null &&
      [ "$(grep -c '"kind":"update"' "$runs/mxfp4/metrics.jsonl")" -ge "$kill_after" ]; do
  kill -0 $job 2>/dev/null || { wait $job; exit 1; }
  sleep 0.2
done
victim=$(pgrep -P $job -f "$program" | tail -n 1)
say "kill -9 of process $victim, one of $ranks ranks"
kill -9 "$victim"
if wait $job; then echo "the job outlived a killed rank"; exit 1; fi
cp "$runs/mxfp4/metrics.jsonl" "$runs/mxfp4/before-kill.jsonl"

say "the same command again: it goes on from the last checkpoint"
$launch "$program" train configs/demo-mxfp4.yaml --set run.folder="$runs/mxfp4"
python3 scripts/compare_replay.py "$runs/mxfp4/before-kill.jsonl" "$runs/mxfp4/metrics.jsonl"

say "held-out loss, nats a byte; curves in $runs/loss.svg"
python3 scripts/plot_loss.py -o "$runs/loss.svg" "$runs/bf16" "$runs/mxfp4"

for route in bf16 mxfp4; do
  say "a sample of $route"
  "$program" generate "$runs/$route" --prompt "The question of freedom is " --tokens 300 --seed 7
done
