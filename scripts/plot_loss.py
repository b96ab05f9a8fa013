#!/usr/bin/env python3
"""Draws loss curves of runs as one SVG, and prints them side by side.

  scripts/plot_loss.py -o loss.svg RUN_FOLDER...

Reads RUN_FOLDER/metrics.jsonl (docs/formats.md).  Thin lines are the training
loss of every update, dots the held-out loss.  Needs the standard library only.
"""
import argparse
import json
import math
import os
import sys

COLOURS = ["#1f4e9c", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#a16207"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 520, 70, 20, 46, 54


def read_run(folder):
    path = os.path.join(folder, "metrics.jsonl")
    run = {"name": os.path.basename(os.path.normpath(folder)), "train": [], "validation": []}
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
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
    run["train"] = [p for p in run["train"] if not isinstance(p[1], str)]  # "nan", "inf"
    if not run["train"]:
        sys.exit("plot_loss: %s holds no update" % path)
    return run


def ticks(low, high, count):
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(runs):
    updates = max(p[0] for r in runs for p in r["train"])
    losses = [p[1] for r in runs for p in r["train"] + r["validation"]]
    low, high = min(losses), max(losses)
    pad = 0.05 * (high - low) or 1
    low, high = low - pad, high + pad

    def x(update):
        return LEFT + (WIDTH - LEFT - RIGHT) * update / updates

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="13">'
           % (WIDTH, HEIGHT), '<rect width="100%" height="100%" fill="white"/>']
    for value in ticks(low, high, 6):
        out.append('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#e5e7eb"/>' % (LEFT, WIDTH - RIGHT, y(value), y(value)))
        out.append('<text x="%d" y="%.1f" text-anchor="end">%.4g</text>' % (LEFT - 8, y(value) + 4, value))
    for value in ticks(0, updates, 8):
        out.append('<text x="%.1f" y="%d" text-anchor="middle">%.4g</text>' % (x(value), HEIGHT - BOTTOM + 20, value))
    out.append('<text x="%d" y="%d" text-anchor="middle">update</text>' % ((LEFT + WIDTH - RIGHT) // 2, HEIGHT - 12))
    out.append('<text transform="translate(18 %d) rotate(-90)" text-anchor="middle">loss, nats a token</text>' % (HEIGHT // 2))
    out.append('<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#6b7280"/>'
               % (LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM))
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)]
        line = " ".join("%.1f,%.1f" % (x(u), y(v)) for u, v in run["train"])
        out.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="1.1" opacity="0.75"/>' % (line, colour))
        for u, v in run["validation"]:
            out.append('<circle cx="%.1f" cy="%.1f" r="4" fill="%s" stroke="white"/>' % (x(u), y(v), colour))
        at = LEFT + 10 + i * 260
        last = ", held out %.4f" % run["validation"][-1][1] if run["validation"] else ""
        out.append('<rect x="%d" y="20" width="18" height="4" fill="%s"/>' % (at, colour))
        out.append('<text x="%d" y="27">%s%s</text>' % (at + 24, run["name"].replace("&", "&amp;").replace("<", "&lt;"), last))
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("runs", nargs="+")
    arguments = parser.parse_args()
    runs = [read_run(folder) for folder in arguments.runs]
    with open(arguments.output, "w", encoding="utf-8") as out:
        out.write(draw(runs))
    print("%10s  " % "update" + "  ".join("%20s" % r["name"][-20:] for r in runs) + "   held-out loss")
    for update in sorted({u for r in runs for u, _ in r["validation"]}):
        row = [dict(r["validation"]).get(update) for r in runs]
        print("%10d  " % update + "  ".join("%20s" % ("-" if v is None else "%.4f" % v) for v in row))


if __name__ == "__main__":
    main()
