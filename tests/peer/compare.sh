#!/bin/sh
# Our step beside PyTorch's, on this machine, in turn: the same model, batch,
# threads and optimizer (configs/demo.yaml).
#   tests/peer/compare.sh PROGRAM PYTHON [ROUNDS]
# PYTHON has torch. The median update of every round counts; the last lines are
# the medians over rounds and their ratios.
set -eu
program=$1 python=$2 rounds=${3:-3}
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset OPENBLAS_CORETYPE || true

scripts/corpus.sh runs/demo/corpus
"$program" prepare configs/demo.yaml --set data.train="$work/train" --set data.validation="$work/validation" >/dev/null

ours() {
  rm -rf "$work/run"
  "$program" train "configs/demo-$1.yaml" --set data.train="$work/train" --set data.validation="$work/validation" \
    --set run.folder="$work/run" --set train.updates=24 --set optimizer.warmup_updates=2 --set checkpoint.every=0 \
    --set validation.samples=8 --set log.level=warning
  "$python" -c '
import json, sys
rates = sorted(r["tokens_per_second"] for r in map(json.loads, open(sys.argv[1])) if r["kind"] == "update")
print(rates[len(rates) // 2])' "$work/run/metrics.jsonl"
}
peer() { "$python" -W ignore tests/peer/pytorch_cpu.py --dtype "$1" --updates 8 | "$python" -c 'import json, sys; print(json.load(sys.stdin)["tokens_per_second_median"])'; }

for round in $(seq "$rounds"); do
  printf '%s %s %s %s\n' "$(ours bf16)" "$(ours mxfp4)" "$(peer fp32)" "$(peer bf16)" >> "$work/rates"
done
"$python" - "$work/rates" <<'END'
import statistics, sys
rows = [list(map(float, line.split())) for line in open(sys.argv[1])]
names = ["fp4d bf16", "fp4d mxfp4-row-sr", "pytorch fp32", "pytorch bf16 autocast"]
median = [statistics.median(column) for column in zip(*rows)]
for name, rate, column in zip(names, median, zip(*rows)):
    print("%-24s %9.0f tokens/s   (%.0f to %.0f)" % (name, rate, min(column), max(column)))
best = max(median[2:])
print("fp4d bf16 / pytorch fp32    %.2f" % (median[0] / median[2]))
print("fp4d bf16 / faster pytorch  %.2f" % (median[0] / best))
print("mxfp4-row-sr step / bf16    %.2f" % (median[0] / median[1]))
END
