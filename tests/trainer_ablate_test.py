#!/usr/bin/env python3
"""ablate and compare from outside: figures of the tables computed again from the records, runs that
are not matched, a run that diverges, stops and goes on, signals, launchers.

Prints "ok NAME" or "not ok NAME: why" for each test; exit status 0 iff all are ok.
"""
import json
import os
import re
import signal
import subprocess
import sys
import xml.dom.minidom

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fp4d import (CONFIG, DATA, DEVICE, DONE, LIMIT, PREEMPTED, ROOT, USAGE, Place, check, ignore_hangups, main, same, take_hangups)

place = Place()
with open(place.at("base.yaml"), "w") as base:
    base.write("include: tiny.yaml\nvalidation: {every: 5, samples: 4}\n")


def ablation(name, **more):
    """Writes NAME.yaml; returns its file name."""
    content = {"base": "base.yaml", "folder": name, "routes": ["bf16", "mxfp4-row-sr"], **more}
    with open(place.at(name + ".yaml"), "w") as f:
        f.write("\n".join(f"{k}: {json.dumps(v)}" for k, v in content.items()) + "\n")
    return name + ".yaml"


def first():
    if not os.path.exists(place.at("a", "compare.md")):
        place.command("ablate", ablation("a")).expect(DONE, "route mxfp4-row-sr \\(2 of 2\\): a/mxfp4-row-sr")
    return place


def compare(*runs, code=DONE, more=()):
    return place.command("compare", *[f"a/{r}" if not os.path.exists(place.at(r)) else r for r in runs], *more).expect(code)


def table(text, head):
    """Rows of the table whose head begins with `head`, as lists of words."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(head))
    rows = []
    for line in lines[at:]:
        if not line.strip():
            break
        rows.append(re.split(r"\s{2,}", line.strip()))
    return rows


def losses(folder, kind="update"):
    return {r["update"]: float(r["loss"]) for r in place.lines(folder, kind)}


def altered(name, change, route="mxfp4-row-sr"):
    """A copy of a run's records, each object changed by change(object); None drops it."""
    first()
    os.makedirs(place.at(name), exist_ok=True)
    with open(place.at("a", route, "metrics.jsonl")) as f, open(place.at(name, "metrics.jsonl"), "w") as out:
        for line in f:
            o = change(json.loads(line))
            if o is not None:
                out.write(json.dumps(o) + "\n")
    return name


# ---- ablate ----------------------------------------------------------------


def test_runs_are_those_of_train():
    first()
    for route in ("bf16", "mxfp4-row-sr"):
        place.run("plain-" + route, {"route": route, "validation.every": 5})
        same(place.updates(f"a/{route}"), place.updates("plain-" + route), route)
        start = place.lines(f"a/{route}", "start")[0]
        check(start["name"] == route and start["route"] == route, "name and route", str(start))
    with open(place.at("a", "compare.md")) as f:
        text = f.read()
    check(text.startswith("Matched: ") and "| mxfp4-row-sr " in text, "compare.md", text)


def test_settings():
    place.command("ablate", ablation("sets", set={"train": {"updates": 3}, "validation": {"every": 0}}, routes=["mxfp4-row-sr", "bf16"]),
                  "--set", "optimizer.lr=1e-3").expect(DONE, "Each run beside mxfp4-row-sr")
    for route in ("bf16", "mxfp4-row-sr"):
        check([r["update"] for r in place.lines(f"sets/{route}", "update")] == [1, 2, 3], "three updates")
        check("lr: 0.001\n" in place.lines(f"sets/{route}", "start")[0]["config"], "both settings")


def test_a_slash_in_a_routes_name():
    r = place.command("ablate", ablation("slash", routes=["bf16", "nvfp4-te/forward-bf16-tail"], set={"train": {"updates": 3}}))
    check(r.code in (DONE, DEVICE), f"exit code {r.code}", r.text)
    if r.code == DONE:
        check(os.path.exists(place.at("slash", "nvfp4-te-forward-bf16-tail", "metrics.jsonl")), "its folder")


def test_stops_and_goes_on():
    for stop, expected in (("4", "stopped in route bf16, 1 of 2"), ("9", "stopped in route bf16, 1 of 2")):
        place.command("ablate", ablation("stops"), "--set", f"run.stop_after_update={stop}").expect(PREEMPTED, expected)
    place.command("ablate", "stops.yaml", "--set", "run.stop_after_update=7").expect(PREEMPTED, "stopped in route mxfp4-row-sr, 2 of 2")
    check(not os.path.exists(place.at("stops", "compare.md")), "nothing is compared before the end")
    place.command("ablate", "stops.yaml").expect(DONE, "Matched: ")
    first()
    for route in ("bf16", "mxfp4-row-sr"):
        same(place.updates(f"stops/{route}"), place.updates(f"a/{route}"), route)
    place.command("ablate", "stops.yaml").expect(DONE, "run bf16 is finished", "run mxfp4-row-sr is finished", "Matched: ")


def test_signals():
    """TERM to ablate is a checkpoint and exit code 75; under mpirun too."""
    mpirun = {"launch": "mpirun -np 2 --oversubscribe --bind-to none"}
    for name, more, number, prepare in (("term", {}, signal.SIGTERM, None), ("int", mpirun, signal.SIGINT, None), ("hup", {}, signal.SIGHUP, take_hangups),
                                        ("nohup", {}, signal.SIGTERM, ignore_hangups)):
        job = place.start("ablate", ablation(name, set={"train": {"updates": 100000}}, **more), prepare=prepare)
        job.wait_for(r"update +\d+/100000")
        if prepare is ignore_hangups:
            job.process.send_signal(signal.SIGHUP)
            seen = int(re.findall(r"update +(\d+)/", job.text())[-1])
            job.wait_for(rf"update +{seen + 20}/")
        job.process.send_signal(number)
        job.end().expect(PREEMPTED, "stopped in route bf16, 1 of 2")
        check(len(place.steps(f"{name}/bf16")) == 1, "a checkpoint")
        check(not os.path.exists(place.at(name, "mxfp4-row-sr")), "the next run does not begin")


def test_launcher():
    place.command("ablate", ablation("launched", launch="mpirun -np 2 --oversubscribe  --bind-to none", set={"train": {"updates": 3}})).expect(DONE)
    check([r["world"] for r in place.lines("launched/mxfp4-row-sr", "start")] == [2], "two ranks")
    place.command("ablate", ablation("nowhere", launch="absent-launcher -n 2")).expect(71, "cannot start absent-launcher", "the run of route bf16 ended with exit code 71")


def test_a_route_diverges():
    """The others go on; the table says so; it is not run again."""
    more = {"routes": ["bf16", "mxfp4-row-sr", "fp32"], "set": {"fault": "nan@6", "divergence": {"nonfinite": "halt"}, "train": {"param_dtype": "fp32"}}}
    r = place.command("ablate", ablation("diverges", **more), ).expect(DONE, "route bf16 diverged; the others go on", "route fp32 diverged")
    row = [row for row in table(r.text, "run") if row[0] == "mxfp4-row-sr"][0]
    check(row[1] == "6" and row[-2] == "5/0/1" and row[-1] == "diverged", "its row", str(row))
    before = place.lines("diverges/bf16")
    place.command("ablate", "diverges.yaml").expect(DONE, r"route bf16 \(1 of 3\): diverged before, not run again")
    check(place.lines("diverges/bf16") == before, "its records stand")


def test_ablation_refused():
    def refused(text, *patterns, code=CONFIG):
        with open(place.at("bad.yaml"), "w") as f:
            f.write(text)
        place.command("ablate", "bad.yaml").expect(code, *patterns)
        check(not os.path.exists(place.at("bad")), "nothing ran")

    whole = "base: tiny.yaml\nfolder: bad\nroutes: [bf16, mxfp4-row-sr]\n"
    refused("folder: bad\n", "bad.yaml: base: is missing", "bad.yaml: routes: is missing")
    refused(whole + "runs: 3\n", "bad.yaml:4:1: runs: unknown key")
    refused(whole + "set: [1]\nlaunch: {}\n", "bad.yaml:4:6: set: a mapping", "bad.yaml:5:9: launch: a text")
    refused(whole + "set: {train: {updates: [1, 2]}}\n", "train.updates: a number or word is wanted")
    refused(whole + "set: {route: fp32}\n", "route: route is each run's own")
    refused(whole + "set: {train: {update: 5}}\n", "train.update: unknown key; did you mean train.updates")
    refused("base: tiny.yaml\nfolder: bad\nroutes: [bf16, bf16]\n", "bad.yaml:3:16: routes: this route stands here twice")
    refused("base: tiny.yaml\nfolder: bad\nroutes: [bf16, fp5]\n", "'?fp5'?")
    refused("base: absent.yaml\nfolder: bad\nroutes: [bf16]\n", "absent.yaml")
    refused("- 1\n", "a mapping is wanted")
    refused("base: [\n", "bad.yaml:")
    # seq_len 64 is no multiple of a strip's blocks along tokens
    refused("base: tiny.yaml\nfolder: bad\nroutes: [bf16, mxfp4-row-sr]\nset: {train: {seq_len: 40}}\n", "route mxfp4-row-sr: .*seq_len 40 is not a multiple of 32")
    with open(place.at("bad.yaml"), "w") as f:
        f.write(whole)
    place.command("ablate", "bad.yaml", "--set", "run.folder=x").expect(CONFIG, "run.folder is each run's own")
    place.command("ablate", "absent.yaml").expect(CONFIG, "absent.yaml")
    place.command("ablate").expect(USAGE, "ABLATION.yaml is missing")


# ---- compare ----------------------------------------------------------------


def test_figures():
    first()
    text = compare("bf16", "mxfp4-row-sr", more=["--every", "1"]).text
    a, b = losses("a/bf16"), losses("a/mxfp4-row-sr")
    check(len(a) == len(b) == 12, "twelve updates")
    head, reference, other = table(text, "update")
    check(head[1:] == [str(u) for u in range(1, 13)], "columns", str(head))
    for c, u in enumerate(range(1, 13), 1):
        check(reference[c] == f"{a[u]:.4f}" and other[c] == f"{b[u] - a[u]:+.4f}", f"update {u}", text)
    head, reference, other = table(text, "held out")
    va, vb = losses("a/bf16", "validation"), losses("a/mxfp4-row-sr", "validation")
    check(head[1:] == ["5", "10", "12"] == [str(u) for u in va], "columns of validations", str(head))
    for c, u in enumerate(va, 1):
        check(reference[c] == f"{va[u]:.4f}" and other[c] == f"{vb[u] - va[u]:+.4f}", f"validation {u}", text)
    row = table(text, "run")[2]
    norms = [float(r["grad_norm"]) for r in place.lines("a/mxfp4-row-sr", "update")]
    check([float(x) for x in table(text, "norm")[2][1:]] == [float(f"{x:.4g}") for x in norms], "norms by update", text)
    late = b[12] - a[12]
    expected = ["mxfp4-row-sr", "12", f"{b[12]:.4f}", f"{b[12] - a[12]:+.4f}", f"{late:+.4f}", f"{100 * (a[12] - b[12]) / a[12]:+.3f}",
                f"{vb[12]:.4f}", f"{vb[12] - va[12]:+.4f}", f"{100 * (va[12] - vb[12]) / va[12]:+.3f}", f"{max(norms):.4g}", f"{norms[-1]:.4g}", "12/0/0", "finished"]
    check(row == expected, f"{row}, expected {expected}")
    check("Matched: initial parameters" in text and "equal" in text, "matched", text)


def test_columns():
    first()
    check(table(compare("bf16", "mxfp4-row-sr").text, "update")[0][1:] == ["1", "2", "4", "6", "8", "10", "12"], "about ten")
    check(table(compare("bf16", "mxfp4-row-sr", more=["--every", "5"]).text, "update")[0][1:] == ["1", "5", "10", "12"], "every 5")
    check(table(compare("bf16", "mxfp4-row-sr", more=["--every", "99"]).text, "update")[0][1:] == ["1", "12"], "every 99")
    check(len(table(compare("bf16").text, "run")) == 2, "one run alone")


def test_exactly_shared():
    """A run that ended early, or lacks updates, is compared where both are."""
    early = altered("early", lambda o: o if o["update"] <= 7 and o["kind"] != "end" else None)
    gap = altered("gap", lambda o: None if o["kind"] == "update" and o["update"] in (4, 12) else o)
    text = compare("bf16", early, gap, more=["--every", "4"]).text
    a, b = losses("a/bf16"), losses("a/mxfp4-row-sr")
    summary, updates = table(text, "run"), table(text, "update")
    check(summary[2][1] == "7" and summary[2][-1] == "none" and summary[2][3] == f"{b[7] - a[7]:+.4f}", "early", text)
    check(summary[3][1] == "11" and summary[3][3] == f"{b[11] - a[11]:+.4f}", "gap", text)
    check(updates[2][1:] == [f"{b[1] - a[1]:+.4f}", f"{b[4] - a[4]:+.4f}", "-", "-"], "early by update", text)
    check(updates[3][1:] == [f"{b[1] - a[1]:+.4f}", "-", f"{b[8] - a[8]:+.4f}", "-"], "gap by update", text)


def test_not_finite():
    odd = altered("odd", lambda o: {**o, "loss": "nan", "grad_norm": "inf"} if o["kind"] == "update" and o["update"] == 12 else o)
    row = table(compare("bf16", odd).text, "run")[2]
    check(row[2] == "nan" and row[3] == "nan" and "inf" in row, "nan and inf", str(row))


def test_unmatched():
    def other_batch(o):
        return {**o, "batch_hash": "0" * 32} if o["kind"] == "update" and o["update"] in (3, 9) else o

    changes = {
        "batch": (other_batch, r"batch: another batch than a/bf16 in 2 shared updates, first in update 3"),
        "init": (lambda o: {**o, "init_hash": "1" * 32} if o["kind"] == "start" else o, "init: initial parameters 1{32}, those of a/bf16"),
        "stream": (lambda o: {**o, "train_digest": "2" * 32} if o["kind"] == "start" else o, "stream: training stream 2{32}"),
        "none-shared": (lambda o: {**o, "update": o["update"] + 100}, "none-shared has no update in common"),
    }
    for name, (change, pattern) in changes.items():
        altered(name, change)
        text = compare("bf16", name, code=DATA).text
        check(re.search(pattern, text) and "--allow-unmatched" in text and "excess" not in text, name, text)
        text = compare("bf16", name, more=["--allow-unmatched"]).text
        check(re.search("not matched: " + pattern, text) and "NOT matched" in text and "excess" in text, name, text)
    text = compare("bf16", "batch", "init", code=DATA).text
    check("batch: another" in text and "init: initial" in text, "every problem at once", text)


def test_other_settings_are_named():
    first()
    place.run("rates", {"route": "mxfp4-row-sr", "validation.every": 5, "optimizer.lr": 1e-3, "run.threads": 2, "log.every": 5})
    text = compare("bf16", "rates").text
    check("Beside the route these settings differ: optimizer.lr." in text, "what differs", text)
    check("settings differ" not in compare("bf16", "mxfp4-row-sr").text, "nothing but the route")
    # a key whose name is a part of another's, which was named before it
    for name, key in (("longer", "validation_fraction: "), ("shorter", "validation: ")):
        altered(name, lambda o: {**o, "config": re.sub(rf"(\n  {key})\S+", r"\g<1>0.123", o["config"])} if o["kind"] == "start" else o)
    text = compare("bf16", "longer", "shorter").text
    check("settings differ: data.validation_fraction, data.validation." in text, "both keys", text)


def test_other_held_out_samples():
    first()
    place.run("held", {"route": "mxfp4-row-sr", "validation.every": 5, "validation.samples": 3})
    row = table(compare("bf16", "held").text, "run")[2]
    check(row[6:9] == ["-", "-", "-"], "not comparable", str(row))


def test_compare_refused():
    first()
    compare("bf16", "absent", code=DATA)
    with open(place.at("torn.jsonl"), "w") as f:
        f.write('{"kind":"update"\n')
    compare("bf16", "torn.jsonl", code=DATA)
    with open(place.at("empty.jsonl"), "w") as f:
        f.write("")
    text = compare("bf16", "empty.jsonl", code=DATA).text
    check("holds no update" in text, "empty", text)
    twice = altered("twice", lambda o: {**o, "update": 4} if o["kind"] == "update" and o["update"] == 5 else o)
    compare("bf16", twice, code=DATA)
    place.command("compare").expect(USAGE, "RUN is missing")
    compare("bf16", "mxfp4-row-sr", code=71, more=["--markdown", "nowhere/x.md"])


def test_records_alone_are_enough():
    """A file serves as well as a folder; a torn last line is left out."""
    first()
    with open(place.at("a", "mxfp4-row-sr", "metrics.jsonl")) as f:
        lines = f.readlines()
    with open(place.at("copy.jsonl"), "w") as f:
        f.writelines(lines[:6] + [lines[6][:20]])
    check(table(compare("bf16", "copy.jsonl").text, "run")[2][0] == "mxfp4-row-sr", "read")


def test_markdown():
    """Whole or not at all: what stood there under another name, too, is not written over."""
    first()
    with open(place.at("c.md"), "w") as f:
        f.write("before")
    os.link(place.at("c.md"), place.at("c-before.md"))
    text = compare("bf16", "mxfp4-row-sr", more=["--markdown", "c.md"]).text
    with open(place.at("c.md")) as f:
        tables = [block.splitlines() for block in f.read().split("\n\n") if block.startswith("|")]
    check(len(tables) == 4, "four tables")
    with open(place.at("c-before.md")) as f:
        check(f.read() == "before" and not os.path.exists(place.at("c.md.tmp")), "published by a rename")
    for lines in tables:
        cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
        check(len({len(c) for c in cells}) == 1 and cells[1][0] == ":--", "a table", "\n".join(lines))
        printed = table(text, cells[0][0])
        check([cells[0]] + cells[2:] == printed, "the same cells", f"{cells}\n{printed}")


# ---- the picture ---------------------------------------------------------------


def script(name, *arguments):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", name), *arguments], cwd=place.path,
                          capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stdout, done.stderr


def plot(*arguments):
    return script("plot_loss.py", *arguments)


def test_plot_of_a_living_run():
    """A last line that is being written, and losses that are not finite, are left out."""
    altered("living", lambda o: {**o, "loss": "nan"} if o["kind"] == "validation" and o["update"] == 12 else o)
    with open(place.at("living", "metrics.jsonl"), "a") as f:
        f.write('{"kind":"upd')
    code, out, err = plot("-o", "n.svg", "living", "a/bf16")
    check(code == 0 and re.search(r"^ +12 +- +\d", out, re.M), out + err)
    code, out, err = plot("-o", "n.svg", "--window", "-1", "living")
    check(code == 2 and "--window" in err, err)


def test_plot_excess():
    first()
    code, out, err = plot("-o", "e.svg", "--excess", "--window", "1", "a/bf16", "a/mxfp4-row-sr")
    check(code == 0, err)
    svg = xml.dom.minidom.parse(place.at("e.svg"))
    lines = svg.getElementsByTagName("polyline")
    points = [tuple(map(float, p.split(","))) for p in lines[0].getAttribute("points").split()]
    check(len(lines) == 1 and len(points) == 12, "one line of twelve points")
    a, b = losses("a/bf16"), losses("a/mxfp4-row-sr")
    excess = [b[u] - a[u] for u in range(1, 13)]
    heights = [-y for _, y in points]
    scale = (max(heights) - min(heights)) / (max(excess) - min(excess))
    worst = max(abs((h - min(heights)) / scale - (e - min(excess))) for h, e in zip(heights, excess))
    check(worst < 0.11 / scale, f"heights are the excess but for rounding: {worst * scale}")
    va, vb = losses("a/bf16", "validation"), losses("a/mxfp4-row-sr", "validation")
    check(f"{vb[12] - va[12]:+.4f}" in out and len(svg.getElementsByTagName("circle")) == 3, "held out", out)
    code, out, err = plot("-o", "w.svg", "--excess", "--window", "5", "--top", "9", "a/bf16", "a/mxfp4-row-sr")
    points = xml.dom.minidom.parse(place.at("w.svg")).getElementsByTagName("polyline")[0].getAttribute("points").split()
    check(code == 0 and len(points) == 3, "means of 5, 5 and 2")
    check(plot("-o", "x.svg", "--excess", "a/bf16")[0] != 0, "one run has no excess")
    check(plot("-o", "x.svg", "--excess", "--top", "-9", "a/bf16", "a/mxfp4-row-sr")[0] != 0, "cut off below everything")
    check(plot("-o", "l.svg", "a/bf16", "a/mxfp4-row-sr")[0] == 0, "losses themselves")


# ---- several seeds -------------------------------------------------------------


def seed(folder, losses, held_out):
    """An ablation's folder by hand: {run: losses of updates 1, 2, ...}, {run: last held-out loss}."""
    for name, values in losses.items():
        os.makedirs(place.at(folder, name))
        with open(place.at(folder, name, "metrics.jsonl"), "w") as f:
            records = [{"kind": "update", "update": u, "loss": v} for u, v in enumerate(values, 1)]
            records.append({"kind": "validation", "update": len(values), "loss": held_out[name]})
            f.writelines(json.dumps(r) + "\n" for r in records)


def test_excess_of_seeds():
    """Means and standard errors by hand: of the last tenth (two of twenty updates), and of the held-out losses."""
    flat = [2.0] * 18
    seed("s1", {"bf16": flat + [1.0, 1.0], "x": flat + [1.1, 1.3], "y": flat + [0.9, 1.0]}, {"bf16": 1.0, "x": 1.25, "y": 1.0})
    seed("s2", {"bf16": flat + [2.0, 1.0], "x": flat + [2.4, 1.4], "y": flat + [2.0, 1.0]}, {"bf16": 2.0, "x": 2.75, "y": 1.5})
    code, out, err = script("excess.py", "--markdown", "t.md", "-o", "s.svg", "--window", "4", "s1", "s2")
    check(code == 0, err)
    # x: 0.2 and 0.4, held out 0.25 and 0.75, 25 % and 37.5 %; y: -0.05 and 0, held out 0 and -0.5, 0 % and -25 %
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("| `")]
    check(rows == [["`y`", "-0.0250", "0.0250", "-0.2500", "0.2500", "-12.50", "+0.0000, -0.5000"],
                   ["`x`", "+0.3000", "0.1000", "+0.5000", "0.2500", "+31.25", "+0.2500, +0.7500"]], "the table", out)
    with open(place.at("t.md")) as f:
        check(f.read() == out, "the same as printed")
    lines = xml.dom.minidom.parse(place.at("s.svg")).getElementsByTagName("polyline")
    check([len(l.getAttribute("points").split()) for l in lines] == [5, 5], "two curves of five windows")
    seed("s3", {"bf16": flat, "x": flat}, {"bf16": 1.0, "x": 1.0})
    seed("s4", {"x": flat}, {"x": 1.0})
    seed("s5", {"bf16": flat, "x": flat[:9], "y": flat}, {"bf16": 1.0, "x": 1.0, "y": 1.0})
    for folders, words in ((["s1", "s3"], "different runs"), (["s4"], "no run bf16"), (["s1", "s5"], "differ in length"), (["none"], "none")):
        code, out, err = script("excess.py", *folders)
        check(code == 1 and words in err and len(err.splitlines()) == 1, f"{folders}: {words}", err)


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
