#!/usr/bin/env python3
"""Excess loss of routes over the first one, as means over ablations of several seeds.

  scripts/excess.py [--markdown TABLE.md] [-o PICTURE.svg] ABLATION_FOLDER...

Each folder is one of `fp4d ablate`: run folders with metrics.jsonl, the same in
all; --first (bf16) is what the others are compared with, update by update, within
its own folder.  Printed: the training loss's excess, mean of the last tenth of the
updates, and the held-out loss's at the end; +- is the standard error of the mean
over the folders.  That runs are matched is for `fp4d compare` to say, folder by
folder.  Needs the standard library only.
"""
import argparse
import math
import os
import sys

from plot_loss import draw, excess, read_run


def read_ablation(folder, first):
    """The excess curves of each route but the first, and the first's last held-out loss."""
    try:
        names = sorted(n for n in os.listdir(folder) if os.path.exists(os.path.join(folder, n, "metrics.jsonl")))
    except OSError as error:
        sys.exit("excess: %s: %s" % (folder, error.strerror))
    if first not in names:
        sys.exit("excess: %s holds no run %s" % (folder, first))
    names.remove(first)
    if not names:
        sys.exit("excess: %s holds no run beside %s" % (folder, first))
    runs = [read_run(os.path.join(folder, name)) for name in [first] + names]
    if any(not run["validation"] for run in runs):
        sys.exit("excess: %s: a run without validation losses" % folder)
    found = excess(runs, 1)
    for run in found:
        if len(run["train"]) != len(runs[0]["train"]):
            sys.exit("excess: %s: %s and %s differ in length" % (folder, run["name"], first))
    return {run["name"]: run for run in found}, runs[0]


def mean(values):
    return sum(values) / len(values)


def standard_error(values):
    n = len(values)
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (n - 1) / n) if n > 1 else float("nan")


def last_tenth(run):
    values = [v for _, v in run["train"]]
    return mean(values[-max(1, len(values) // 10):])


def last_held_out(run):
    return run["validation"][-1][1]


def windows(points, size):
    pieces = [points[i:i + size] for i in range(0, len(points), size)]
    return [(mean([u for u, _ in p]), mean([v for _, v in p])) for p in pieces]


def average(name, runs, size):
    """One curve of several seeds'."""
    across = lambda kind: [(at[0][0], mean([v for _, v in at])) for at in zip(*(run[kind] for run in runs))]
    return {"name": name, "train": windows(across("train"), size), "validation": across("validation")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", help="the curves, means over the folders, as SVG")
    parser.add_argument("--markdown", help="the table")
    parser.add_argument("--first", default="bf16", help="the run folder of what the others are compared with (default bf16)")
    parser.add_argument("--window", type=int, default=25, help="updates whose mean is drawn (default 25)")
    parser.add_argument("folders", nargs="+")
    arguments = parser.parse_args()
    ablations, firsts = zip(*(read_ablation(folder, arguments.first) for folder in arguments.folders))
    routes = sorted(ablations[0])
    for folder, ablation in zip(arguments.folders, ablations):
        if sorted(ablation) != routes:
            sys.exit("excess: %s and %s hold different runs" % (arguments.folders[0], folder))
    rows = []
    for route in routes:
        runs = [ablation[route] for ablation in ablations]
        train, held_out = [last_tenth(r) for r in runs], [last_held_out(r) for r in runs]
        percent = [100 * v / last_held_out(f) for v, f in zip(held_out, firsts)]
        rows.append((mean(held_out), route, train, held_out, percent))
    rows.sort()
    lines = ["| route | training, last tenth | +- | held out, end | +- | %% of `%s` | each seed, held out |" % arguments.first,
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for _, route, train, held_out, percent in rows:
        lines.append("| `%s` | %+.4f | %.4f | %+.4f | %.4f | %+.2f | %s |" % (
            route, mean(train), standard_error(train), mean(held_out), standard_error(held_out), mean(percent),
            ", ".join("%+.4f" % v for v in held_out)))
    lines.append("")
    lines.append("`%s` itself, held out at the end: %s." % (arguments.first, ", ".join("%.4f" % last_held_out(f) for f in firsts)))
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.markdown:
        with open(arguments.markdown, "w", encoding="utf-8") as out:
            out.write(text)
    if arguments.output:
        curves = [average(route, [a[route] for a in ablations], arguments.window) for _, route, *_ in rows]
        label = "loss above that of %s, nats a token; mean of %d seeds" % (arguments.first, len(ablations))
        with open(arguments.output, "w", encoding="utf-8") as out:
            out.write(draw(curves, label, "%+.4f", None))


if __name__ == "__main__":
    main()
