#!/usr/bin/env python3
"""Weak scaling of a configuration on the GPUs of this host, by real training:

  scripts/scaling.py CONFIG [--ranks 2] [--updates 8] [--accumulation 8] [--program build/fp4d] [--set key=value]...

Trains CONFIG a few updates each on one GPU and on --ranks of them: one micro-batch an update, --accumulation of
them, and with twice the local batch, and FP32 gradients, where these fit.  Prints of each the median update
(without the first two), tokens/s, the share of what as many single GPUs do, the time that the GPU stood still
for exchanges, and memory beside what was planned.  Nothing is validated or saved.  A run that does not fit, or
fails, is said with its message; exit status 1 if none ran.  A share with a * is of one GPU's with BF16 gradients, where it has no memory for FP32 ones.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("config")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--updates", type=int, default=8)
    p.add_argument("--accumulation", type=int, default=8)
    p.add_argument("--program", default=os.path.join("build", "fp4d"))
    p.add_argument("--set", action="append", default=[])
    return p.parse_args()


def measure(a, ranks, local, accumulation, dtype):
    """Records of a run's updates, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="fp4d-scaling-") as folder:
        settings = {"run.backend": "sm90", "train.updates": a.updates, "train.local_batch": local,
                    "train.global_batch": ranks * local * accumulation, "train.gradient_dtype": dtype, "checkpoint.every": 0,
                    "checkpoint.at_end": "false", "checkpoint.async": "false", "optimizer.warmup_updates": 0}
        own = {"run.folder": folder, "data.validation": "", "validation.every": 0}  # whatever else is set
        launcher = ["mpirun", "-np", str(ranks), "--bind-to", "none"] if ranks > 1 else []
        pairs = [f"{k}={v}" for k, v in settings.items()] + a.set + [f"{k}={v}" for k, v in own.items()]
        words = [w for pair in pairs for w in ("--set", pair)]
        try:
            done = subprocess.run(launcher + [a.program, "train", a.config] + words, capture_output=True, text=True)
        except OSError as e:
            return [], f"{e.filename}: {e.strerror}"
        if done.returncode == 0:
            with open(os.path.join(folder, "metrics.jsonl")) as f:
                return [r for r in map(json.loads, f) if r["kind"] == "update"], ""
        lines = [line for line in done.stderr.splitlines() if line.strip("- ")]
        said = [line for line in lines if "error: " in line] or lines  # the launcher's own, where the program did not come to speak
        return [], said[0] if said else f"ended with {done.returncode}"


def main():
    a = parse()
    k = a.accumulation
    if k < 2 or k % 2:
        sys.exit("scaling: --accumulation must be even, so that twice the local batch makes the same update")
    if a.ranks < 2:
        sys.exit("scaling: --ranks must be 2 or more")
    if a.updates < 1:
        sys.exit("scaling: --updates must be 1 or more")
    cases = [(1, 1, 1, "bf16"), (a.ranks, 1, 1, "bf16"), (1, 1, k, "bf16"), (a.ranks, 1, k, "bf16"), (1, 2, 1, "bf16"), (a.ranks, 2, 1, "bf16"),
             (a.ranks, 2, k // 2, "bf16"), (1, 1, k, "fp32"), (a.ranks, 1, k, "fp32")]
    single = {}  # tokens/s of one GPU by samples of its update and gradients
    failed = 0
    print(f"{'ranks':>5} {'local':>5} {'micro-batches':>13} {'gradients':>9} {'update ms':>10} {'tokens/s':>9} {'scaling':>8} {'exposed ms':>10} "
          f"{'memory GB':>10} {'planned':>8} {'loss':>14}", flush=True)
    for ranks, local, accumulation, dtype in cases:
        records, why = measure(a, ranks, local, accumulation, dtype)
        head = f"{ranks:>5} {local:>5} {accumulation:>13} {dtype:>9}"
        if not records:
            failed += 1
            print(f"{head} {why}", flush=True)
            continue
        late = records[2:] or records
        rate = statistics.median(r["tokens_per_second"] for r in late)
        samples = local * accumulation
        if ranks == 1:
            single.setdefault((samples, dtype), rate)
        one = single.get((samples, dtype))
        other = single.get((samples, "bf16"))  # what one GPU has no memory for has a share of this, marked
        scaling = f"{rate / ranks / one:8.3f}" if one else f"{rate / ranks / other:7.3f}*" if other else f"{'-':>8}"
        memory = records[0].get("device_memory_bytes", {})
        print(f"{head} {1e3 * statistics.median(r['seconds']['total'] for r in late):10.1f} {rate:9.0f} {scaling} "
              f"{statistics.median(r['exchange_wait_ms'] for r in late):10.2f} {memory.get('used', 0) / 1e9:10.3f} {memory.get('planned', 0) / 1e9:8.3f} "
              f"{records[0]['loss']:7.4f} {records[-1]['loss']:6.4f}", flush=True)
    return 1 if failed == len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
