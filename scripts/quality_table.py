#!/usr/bin/env python3
"""The gradient-quality tables, in Markdown, from `fp4d bench quantize --from CAPTURE --json`.

  fp4d bench quantize --from capture.h5 --json > quality.json
  scripts/quality_table.py quality.json > quality.md

Relative L2 error of each linear's three contractions under each route against the
same contraction in FP32, means over the captured updates (of error energies), and
ratios of error energy between routes.  Routes whose operands are those of an
earlier one everywhere are named with it.  Needs the standard library only.
"""
import json
import math
import sys

CONTRACTIONS = ("fprop", "dgrad", "wgrad")
# Whose error energy stands over whose, and in which contraction.
RATIOS = [("dgrad", "mxfp4-row-sr", "nvfp4-local"), ("dgrad", "mxfp4-row-sr", "nvfp4-local-pow2"),
          ("dgrad", "mxfp4-row-sr", "nvfp4-global"), ("fprop", "mxfp4-row-sr", "nvfp4-local"),
          ("wgrad", "mxfp4-row-sr", "mxfp4-row-sr-h32"), ("wgrad", "mxfp4-row-sr", "nvfp4-local"),
          ("wgrad", "nvfp4-local", "nvfp4-local-h16"), ("wgrad", "nvfp4-global", "te-native"),
          ("wgrad", "operand-hybrid-h16", "operand-hybrid-h32")]


def read(path):
    """(contraction, layer, site) -> route -> mean relative error energy; in the order of the file."""
    sums, routes = {}, []
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line) if line.startswith("{") else {}
                if row.get("row") != "contraction":
                    continue
                place = sums.setdefault((row["contraction"], row["layer"], row["site"]), {})
                place.setdefault(row["route"], []).append(row["relative_l2"] ** 2)
                if row["route"] not in routes:
                    routes.append(row["route"])
    except (OSError, ValueError, KeyError) as error:
        sys.exit("quality_table: %s: %s" % (path, error))
    if not sums:
        sys.exit("quality_table: %s holds no contraction (fp4d bench quantize --from ... --json)" % path)
    return {p: {r: sum(v) / len(v) for r, v in at.items()} for p, at in sums.items()}, routes


def group(energy, routes):
    """Routes of equal numbers everywhere, together."""
    groups = {}
    for route in routes:
        groups.setdefault(tuple(at[route] for at in energy.values()), []).append(route)
    return list(groups.values())


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    energy, routes = read(sys.argv[1])
    groups = group(energy, routes)

    def pooled(contraction, route):
        values = [at[route] for (c, _, _), at in energy.items() if c == contraction]
        return sum(values) / len(values)

    table(["route"] + ["%s, all" % c for c in CONTRACTIONS],
          [[", ".join("`%s`" % r for r in names)] + ["%.4f" % math.sqrt(pooled(c, names[0])) for c in CONTRACTIONS] for names in groups])
    rows = []
    for contraction, above, below in RATIOS:
        if above not in routes or below not in routes:
            continue
        each = sorted(at[above] / at[below] for (c, _, _), at in energy.items() if c == contraction)
        geometric = math.exp(sum(map(math.log, each)) / len(each)) if each[0] > 0 else 0
        rows.append([contraction, "`%s` / `%s`" % (above, below), "%.3f" % (pooled(contraction, above) / pooled(contraction, below)),
                     "%.3f" % geometric, "%.2f to %.2f" % (each[0], each[-1])])
    table(["contraction", "error energy", "pooled", "geometric mean", "single linears"], rows)
    for contraction in CONTRACTIONS:
        print("%s, relative L2 error\n" % contraction.capitalize())
        places = [p for p in energy if p[0] == contraction]
        table(["route"] + ["%d %s" % (layer, site) for _, layer, site in places],
              [["`%s`" % names[0]] + ["%.3f" % math.sqrt(energy[p][names[0]]) for p in places] for names in groups])


if __name__ == "__main__":
    main()
