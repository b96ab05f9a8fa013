#!/usr/bin/env python3
"""Draws loss curves of runs as one SVG, and prints them side by side.

  scripts/plot_loss.py -o loss.svg [--excess] RUN_FOLDER...

Reads RUN_FOLDER/metrics.jsonl (docs/formats.md).  Thin lines are the training
loss of every update, dots the held-out loss.  With --excess: how far above the
first run's, at exactly shared updates, the lines as means over --window updates.
Whether the runs are matched is for `fp4d compare` to say.  Needs the standard
library only.
"""
import argparse
import json
import math
import os
import sys

COLOURS = ["#1f4e9c", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#a16207",
           "#be185d", "#475569", "#65a30d", "#dc2626", "#0284c7", "#854d0e"]
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 900, 520, 70, 20, 54
LETTER = 7.4  # about as wide as a letter of the legend is


def read_run(folder):
    path = os.path.join(folder, "metrics.jsonl")
    run = {"name": os.path.basename(os.path.normpath(folder)), "train": [], "validation": []}
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith("\n"):
                    break  # being written, or torn by the end of its process
                record = json.loads(line)
                if record["kind"] == "start":
                    run["name"] = record["name"]
                elif record["kind"] == "update":
                    run["train"].append((record["update"], record["loss"]))
                elif record["kind"] == "validation":
                    run["validation"].append((record["update"], record["loss"]))
    except OSError as error:
        sys.exit("plot_loss: %s: %s" % (path, error.strerror))
    except (ValueError, KeyError) as error:
        sys.exit("plot_loss: %s:%d: not a metrics record (%s)" % (path, number, error))
    for kind in ("train", "validation"):
        run[kind] = [p for p in run[kind] if not isinstance(p[1], str)]  # "nan", "inf"
    if not run["train"]:
        sys.exit("plot_loss: %s holds no update" % path)
    return run


def excess(runs, window):
    """Every other run minus the first, update by update; means of windows."""
    first = {kind: dict(runs[0][kind]) for kind in ("train", "validation")}
    found = []
    for run in runs[1:]:
        above = {kind: [(u, v - first[kind][u]) for u, v in run[kind] if u in first[kind]] for kind in first}
        if not above["train"]:
            sys.exit("plot_loss: %s has no update in common with %s" % (run["name"], runs[0]["name"]))
        pieces = [above["train"][i:i + window] for i in range(0, len(above["train"]), window)]
        above["train"] = [(sum(u for u, _ in p) / len(p), sum(v for _, v in p) / len(p)) for p in pieces]
        found.append({**run, **above})
    return found


def ticks(low, high, count):
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(runs, label, number, cut):
    names = [run["name"] + (", held out " + number % run["validation"][-1][1] if run["validation"] else "") for run in runs]
    beside = max(1, min(3, int((WIDTH - LEFT) / (34 + LETTER * max(map(len, names))))))  # runs on a line of the legend
    top = 26 + 20 * math.ceil(len(runs) / beside)
    updates = max(p[0] for r in runs for p in r["train"] + r["validation"])
    losses = [p[1] for r in runs for p in r["train"] + r["validation"]]
    low, high = min(losses), max(losses)
    pad = 0.05 * (high - low) or 0.05
    low, high = low - pad, high + pad if cut is None else cut
    if high <= low:
        sys.exit("plot_loss: --top %g is below all there is to draw" % cut)

    def x(update):
        return LEFT + (WIDTH - LEFT - RIGHT) * update / updates

    def y(loss):
        return top + (HEIGHT - top - BOTTOM) * (high - loss) / (high - low)

    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="13">'
           % (WIDTH, HEIGHT), '<rect width="100%" height="100%" fill="white"/>']
    for value in ticks(low, high, 6):
        out.append('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#e5e7eb"/>' % (LEFT, WIDTH - RIGHT, y(value), y(value)))
        out.append('<text x="%d" y="%.1f" text-anchor="end">%.4g</text>' % (LEFT - 8, y(value) + 4, value))
    for value in ticks(0, updates, 8):
        out.append('<text x="%.1f" y="%d" text-anchor="middle">%.4g</text>' % (x(value), HEIGHT - BOTTOM + 20, value))
    out.append('<text x="%d" y="%d" text-anchor="middle">update</text>' % ((LEFT + WIDTH - RIGHT) // 2, HEIGHT - 12))
    out.append('<text transform="translate(18 %d) rotate(-90)" text-anchor="middle">%s</text>' % (HEIGHT // 2, label))
    out.append('<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#6b7280"/>'
               % (LEFT, top, WIDTH - LEFT - RIGHT, HEIGHT - top - BOTTOM))
    out.append('<clipPath id="inside"><rect x="%d" y="%d" width="%d" height="%d"/></clipPath>'
               % (LEFT, top, WIDTH - LEFT - RIGHT, HEIGHT - top - BOTTOM))
    for i, run in enumerate(runs):
        colour, dash = COLOURS[i % len(COLOURS)], "6 3" if i >= len(COLOURS) else "none"
        line = " ".join("%.1f,%.1f" % (x(u), y(v)) for u, v in run["train"])
        out.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="1.1" stroke-dasharray="%s" opacity="0.75" '
                   'clip-path="url(#inside)"/>' % (line, colour, dash))
        for u, v in run["validation"]:
            out.append('<circle cx="%.1f" cy="%.1f" r="4" fill="%s" stroke="white" clip-path="url(#inside)"/>' % (x(u), y(v), colour))
        left, line_top = LEFT + 10 + i % beside * (WIDTH - LEFT) // beside, 20 + 20 * (i // beside)
        out.append('<line x1="%d" x2="%d" y1="%d" y2="%d" stroke="%s" stroke-width="4" stroke-dasharray="%s"/>'
                   % (left, left + 18, line_top + 2, line_top + 2, colour, dash))
        out.append('<text x="%d" y="%d">%s</text>' % (left + 24, line_top + 7, names[i].replace("&", "&amp;").replace("<", "&lt;")))
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--excess", action="store_true", help="loss above the first run's")
    parser.add_argument("--window", type=int, default=0, help="updates whose mean is drawn (default: a hundredth of the first run)")
    parser.add_argument("--top", type=float, help="cut the picture off above this")
    parser.add_argument("runs", nargs="+")
    arguments = parser.parse_args()
    if arguments.window < 0:
        parser.error("--window must not be negative")
    folders = {os.path.realpath(folder): folder for folder in reversed(arguments.runs)}  # each once, where it stands first
    runs = [read_run(folder) for folder in reversed(folders.values())]
    label, number = "loss, nats a token", "%.4f"
    if arguments.excess:
        number = "%+.4f"
        label = "loss above that of %s, nats a token" % runs[0]["name"]
        runs = excess(runs, arguments.window or max(1, len(runs[0]["train"]) // 100))
        if not runs:
            sys.exit("plot_loss: --excess needs two runs or more")
    with open(arguments.output, "w", encoding="utf-8") as out:
        out.write(draw(runs, label.replace("&", "&amp;").replace("<", "&lt;"), number, arguments.top))
    print("%10s  " % "update" + "  ".join("%20s" % r["name"][-20:] for r in runs) + "   held-out loss")
    for update in sorted({u for r in runs for u, _ in r["validation"]}):
        row = [dict(r["validation"]).get(update) for r in runs]
        print("%10d  " % update + "  ".join("%20s" % ("-" if v is None else number % v) for v in row))


if __name__ == "__main__":
    main()
