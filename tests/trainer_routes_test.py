#!/usr/bin/env python3
"""What every route says of itself, refuses and shares with the others, seen from outside.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import json
import os
import re
import sys

from fp4d import CHECKPOINT, CONFIG, DIVERGED, DONE, Place, built_in_routes, check, main, route_settings, words

place = Place()

# What a block's line begins with for each contraction, from the routes' definitions (docs/numerics.md):
# x, w of fprop; dy, w of dgrad; dy, x of wgrad.
MX, TILES = "mxfp4/1x32/encode", "mxfp4/2d32/adaptive"
NV, NV_TILES = "nvfp4/1x16/tensor", "nvfp4/2d16/tensor"
LC, LC_TILES = "nvfp4-local/1x16/faithful/strip256", "nvfp4-local/2d16/faithful"
P2, P2_TILES = LC.replace("faithful", "pow2"), LC_TILES.replace("faithful", "pow2")


def uniform(row, tile, transform="", column_sr=""):
    return (row, tile, row + "/sr", tile, row + column_sr + transform, row + transform)


def hybrid(transform):
    return (MX, TILES, LC + "/sr", LC_TILES, MX + transform, MX + transform)


TE = uniform(NV, NV_TILES, "/signed-16", "/sr")
EXECUTED = {
    "fp32": ("fp32",) * 6, "bf16": ("bf16",) * 6,
    "te-native": TE, "te-last4-bf16": TE, "nvfp4-te/forward-bf16-tail": TE,
    "nvfp4-global": uniform(NV, NV_TILES),
    "mxfp4-row-sr": uniform(MX, TILES), "mxfp4-row-sr-h32": uniform(MX, TILES, "/signed-32"),
    "nvfp4-local": uniform(LC, LC_TILES), "nvfp4-local-h16": uniform(LC, LC_TILES, "/signed-16"),
    "nvfp4-local-pow2": uniform(P2, P2_TILES), "nvfp4-local-pow2-h16": uniform(P2, P2_TILES, "/signed-16"),
    "depth-27-5": uniform(LC, LC_TILES),
    "operand-hybrid-h16": hybrid("/plain-16"), "operand-hybrid-h32": hybrid("/signed-32"),
    "fp8": ("e4m3/tensor", "e4m3/tensor", "e5m2/tensor", "e4m3/tensor", "e5m2/tensor", "e4m3/tensor"),
}
for pv in ("fp8", "mxfp4"):
    EXECUTED["attention-" + pv] = ("bf16",) * 6
    EXECUTED[f"attention-{pv}-proj-e4m3"] = ("e4m3/tensor", "e4m3/tensor", "bf16", "bf16", "bf16", "bf16")
    EXECUTED[f"attention-{pv}-proj-nvfp4"] = (NV, NV_TILES, NV, NV_TILES, "bf16", "bf16")
ATTENTION = {"": "q k {0}, p fp32, v {0}, softmax fp32 | backward: scores q k {0}, p fp32, do {0}, ds fp32, q k {0}, v {0}",
             "fp8": "q k nvfp4, p e4m3, v e4m3, softmax fp32 | backward: scores q k nvfp4, p e4m3, do e5m2, ds e4m3, q k v e4m3",
             "mxfp4": "q k nvfp4, p mxfp4, v mxfp4, softmax fp32 | backward: scores q k nvfp4, p e4m3, do e5m2, ds e4m3, q k v e4m3"}
LAST = {"te-last4-bf16": ("bf16",) * 6, "depth-27-5": uniform(MX, TILES)}  # of the last block


def formats(line):
    """fprop x, w, dgrad dy, w, wgrad dy, x of a start-up line, without "by arm"."""
    found = re.search(r"fprop x (\S+).*? w (\S+).*?\| dgrad dy (\S+).*? w (\S+).*?\| wgrad dy (\S+).*? x (\S+)", line)
    check(found, "a line of formats", line)
    return found.groups()


def test_executed_is_printed_and_on_record():
    check(sorted(EXECUTED) == sorted(built_in_routes()), "every route of the table", str(sorted(built_in_routes())))
    for route in built_in_routes():
        name = "says-" + route.replace("/", "-")
        settings = {**route_settings(route), "train.updates": 1, "optimizer.warmup_updates": 0, "checkpoint.at_end": False}
        out = place.run(name, settings)
        lines = place.lines(name, "start")[0]["executed"]
        check(all(line in out.text for line in lines), f"{route}: what is on record is printed", out.text)
        blocks = {}
        for line in lines:
            span = re.match(r"blocks (\d+)-(\d+)  (?!attention)", line)
            for block in range(int(span.group(1)), int(span.group(2)) + 1) if span else ():
                blocks.setdefault(block, []).append(line)
        check(sorted(blocks) == list(range(1, settings["model.n_layers"] + 1)), f"{route}: every block", "\n".join(lines))
        for line in blocks[1]:
            expected = ("bf16",) * 6 if route.startswith("attention-") and "gate_up, down" in line else EXECUTED[route]
            check(formats(line) == expected, f"{route}: {expected}", line)
        kind = (re.match(r"attention-(fp8|mxfp4)", route) or [0, ""])[1]
        attention = [line for line in lines if re.match(r"blocks 1-\d+  attention: ", line)]
        check(len(attention) == 1 and ATTENTION[kind].format("fp32" if route == "fp32" else "bf16") in attention[0],
              f"{route}: attention", "\n".join(attention))
        for line in blocks[max(blocks)]:
            expected = ("bf16",) * 6 if route.startswith("attention-") and "gate_up, down" in line else LAST.get(route, EXECUTED[route])
            check(formats(line) == expected, f"{route}: the last block", line)
        check(any(line.startswith("head: ") for line in lines), f"{route}: the head", "\n".join(lines))


def test_misfits_are_named():
    """Before any memory: the operand, the linear and the number; train and check say the same."""
    for route, change, pattern in (
            ("mxfp4-row-sr", {"model.hidden_size": 144, "model.head_dim": 64}, r"fprop x mxfp4/1x32/encode: qkv: columns 144 "),
            ("mxfp4-row-sr", {"model.ffn_size": 272}, r"fprop x mxfp4/1x32/encode: down: columns 272 "),
            ("mxfp4-row-sr", {"train.seq_len": 48}, r"wgrad dy mxfp4/1x32/encode: qkv: seq_len 48 is not a multiple of 32"),
            ("te-native", {"model.hidden_size": 136, "model.head_dim": 64}, r"dgrad w nvfp4/2d16/tensor: out: rows 136 is not a multiple of 16"),
            ("nvfp4-local", {"model.ffn_size": 352}, r"gate_up: ffn_size 352 is not a multiple of 256"),
            ("attention-fp8", {"model.head_dim": 24, "model.n_heads": 4}, r"attention qk nvfp4: head_dim 24 is not a multiple of 16"),
            ("attention-mxfp4", {"model.head_dim": 24, "model.n_heads": 4}, r"attention pv mxfp4: head_dim is not a multiple of 16"),
            ("attention-fp8-proj-nvfp4", {"model.hidden_size": 136, "model.head_dim": 32}, r"dgrad w nvfp4/2d16/tensor: out: rows 136 is not a multiple of 16"),
            ("fp8", {"train.seq_len": 40}, r"wgrad dy e5m2/tensor: qkv: seq_len 40 is not a multiple of 16")):
        settings = {**route_settings(route), **change}
        place.train("misfit", settings).expect(CONFIG, pattern)
        check(not os.path.exists(place.at("misfit", "metrics.jsonl")), "nothing began")
        place.command("check", "tiny.yaml", *words({**settings, "run.folder": "misfit"})).expect(CONFIG, pattern)
    linears = [{"layers": "4-9", "fprop": {"x": "bf16", "w": "bf16"}, "dgrad": {"dy": "bf16"}, "wgrad": {"x": "bf16", "dy": "bf16"}}]
    with open(place.at("absent.yaml"), "w") as f:
        f.write("include: [tiny.yaml]\nroute: " + json.dumps({"name": "custom:absent", "linears": linears}) + "\n")
    out = place.command("train", "absent.yaml", "--set", "run.folder=absent").expect(CONFIG)
    check(re.search(r"\b4-9\b|\blayers?\b", out.text), "blocks that are not there are named", out.text)


def test_signals_of_attention():
    """Zeros and saturations of attention's codes in every update's record, and what a threshold on the zeros does."""
    settings = {"train.updates": 3, "checkpoint.at_end": False}
    for pv, fewer in (("fp8", ()), ("mxfp4", ("zero_blocks",))):
        place.run("seen-" + pv, {**settings, "route": "attention-" + pv})
        for r in place.lines("seen-" + pv, "update"):
            seen = {tensor: {k: float(v) for k, v in shares.items()} for tensor, shares in r["attention"].items()}
            share = ("saturated", "underflowed")
            check({k: tuple(v) for k, v in seen.items()} == {
                "q": share + ("zero_blocks",), "k": share + ("zero_blocks",), "v": share + fewer, "p": ("underflowed",) + fewer,
                "do": share + ("amax",), "ds": share + ("amax",)}, "keys", str(seen))
            check(all(0 <= v < 0.2 for tensor in seen.values() for k, v in tensor.items() if k != "amax"), "shares", str(seen))
            check(0.01 < seen["q"]["underflowed"] and 0 < seen["ds"]["underflowed"] and 0 < seen["ds"]["amax"] < 1 > seen["do"]["amax"] > 0,
                  "FP4 loses small elements", str(seen))
            check("reason" not in r, "nothing odd", str(r))
    place.run("seen-bf16", settings)
    check(all("attention" not in r for r in place.lines("seen-bf16", "update")), "no codes, no counts")
    alarm = {**settings, "route": "attention-fp8", "divergence.attention_zero_fraction": 0}
    for np in (0, 2):
        for policy, verdicts, code in (("record", ["applied"] * 3, DONE), ("skip", ["skipped"] * 3, DONE), ("halt", ["halted"], DIVERGED)):
            name = f"zeros-{policy}-{np}"
            place.train(name, {**alarm, "divergence.attention_zeros": policy}, np).expect(code, r"\d %% of attention's d[so] became zero by rounding".replace("%%", "%"))
            check([r["verdict"] for r in place.lines(name, "update")] == verdicts, name, str(place.lines(name, "update")))


def composed(name, attention):
    """A configuration file of a route that composes attention with BF16 linears."""
    linears = [{"fprop": {"x": "bf16", "w": "bf16"}, "dgrad": {"dy": "bf16"}, "wgrad": {"x": "bf16", "dy": "bf16"}}]
    with open(place.at(name + ".yaml"), "w") as f:
        f.write("include: [tiny.yaml]\nroute: " + json.dumps({"name": "custom:" + name, "linears": linears, "attention": attention}) + "\n")
    return place.command("train", name + ".yaml", "--set", "run.folder=" + name, "--set", "train.updates=4")


def test_numbers_of_attention():
    """Without a lift that follows dO, gradients of a mean loss vanish in E4M3 dS: seen as zeros, and told.  The affine map is another P."""
    composed("unlifted", {"qk": "nvfp4", "pv": "e4m3", "do": "e5m2", "do_lift": 1}).expect(
        DONE, r"do e5m2 \(lift 4 x 1\)", r"update 1 applied: \d+\.\d % of attention's ds became zero by rounding")
    composed("lifted", {"qk": "nvfp4", "pv": "e4m3", "do": "e5m2", "do_lift": 2.0**20}).expect(DONE, r"lift 4 x 1\.04858e\+06")
    check(float(place.lines("unlifted", "update")[0]["attention"]["ds"]["underflowed"]) > 0.9
          > 0.2 > float(place.lines("lifted", "update")[0]["attention"]["ds"]["underflowed"]), "zeros of dS")
    formats = {"qk": "nvfp4", "pv": "mxfp4", "do": "e5m2"}
    composed("affine", {**formats, "p_slope": 1.5, "p_offset": 1.2}).expect(DONE, r"codes of p by 1\.5 x \+ 1\.2")
    composed("exp2", formats).expect(DONE)
    check(place.updates("affine")[0]["loss"] != place.updates("exp2")[0]["loss"], "another P")
    composed("affine", {**formats, "p_slope": 1.5, "p_offset": 1.3}).expect(
        CHECKPOINT, r"constant of the route changed: attention_p_offset is 1\.29\d*, the checkpoint's is 1\.2")


def test_routes_begin_alike():
    """All of them from the same parameters, on the same samples; compare prints both digests."""
    routes = [r for r in built_in_routes() if r != "fp32"]
    runs = []
    for route in routes:
        runs.append("alike-" + route.replace("/", "-"))
        place.run(runs[-1], {**route_settings(route), "model.n_layers": 6, "train.updates": 2, "checkpoint.at_end": False})
    starts = [place.lines(run, "start")[0] for run in runs]
    for key in ("init_hash", "train_digest", "validation_digest"):
        check(len({s[key] for s in starts}) == 1, f"one {key}")
    check(len({tuple(place.column(run, "batch_hash")) for run in runs}) == 1, "the same batches")
    check(len({place.updates(run)[1]["loss"] for run in runs}) > 10, "but other losses")
    place.command("compare", *runs).expect(
        DONE, rf"Matched: initial parameters {starts[0]['init_hash']}, training stream {starts[0]['train_digest']} and the batch of every shared update are equal")


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
