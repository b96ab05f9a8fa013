#!/usr/bin/python3
"""capture and bench quantize of a tiny run, beside h5py and numpy: what is in the file, and the
figures made from it, computed again from the formulas of docs/numerics.md.

Prints "ok NAME" or "not ok NAME: why" for each test; exit status 0 iff all are ok.  Without h5py
(Debian: python3-h5py): "ok ... # skipped".
"""
import glob
import json
import os
import resource
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fp4d import CHECKPOINT, CONFIG, DATA, DONE, H5PY_PYTHON, USAGE, Place, check, main

try:
    import h5py
    import numpy
except ImportError:
    if os.path.exists(H5PY_PYTHON) and not os.environ.get("FP4D_TEST_PYTHON"):
        os.environ["FP4D_TEST_PYTHON"] = "1"
        os.execv(H5PY_PYTHON, [H5PY_PYTHON, os.path.abspath(__file__)] + sys.argv[1:])
    print("ok trainer_capture # skipped: no h5py")
    sys.exit(0)

SEQ, BATCH, LOCAL, N_LAYERS = 64, 8, 2, 3
HIDDEN, FFN, QKV = 64, 128, 128
TOKENS = LOCAL * SEQ
SHAPES = {"qkv": (QKV, HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
META = {"qkv": ("attention.wq", "attention.wk", "attention.wv"), "out": ("attention.wo",),
        "gate_up": ("feed_forward.w1", "feed_forward.w3"), "down": ("feed_forward.w2",)}

place = Place(**{"model.n_layers": N_LAYERS, "model.ffn_size": FFN, "train.updates": 5, "route": "mxfp4-row-sr",
                 "train.local_batch": LOCAL})
place.run("run")


def capture(out, *arguments, config="tiny.yaml", checkpoint="run"):
    return place.command("capture", checkpoint, config, "--out", out, *arguments)


def first():
    """block 1 and 3, updates 6 and 7: captured once."""
    if not os.path.exists(place.at("c.h5")):
        capture("c.h5", "--layers", "1,3", "--updates", "2").expect(DONE, r"40 tensors, \d+ bytes, of updates 6 to 7 after .*step-00000005")
    return h5py.File(place.at("c.h5"), "r")


def datasets(f):
    found = {}
    f.visititems(lambda name, d: found.update({name: d}) if isinstance(d, h5py.Dataset) else None)
    return found


def to_bf16(x):
    u = numpy.ascontiguousarray(x, numpy.float32).view(numpy.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) & numpy.uint32(0xFFFF0000)).view(numpy.float32)


def test_file():
    with first() as f:
        expected = {"format": "fp4d-capture", "version": 1, "route": "bf16", "trained_route": "mxfp4-row-sr", "update": 5,
                    "seed": 42, "n_layers": N_LAYERS, "tokens": TOKENS, "batch": LOCAL, "seq_len": SEQ, "n_heads": 2,
                    "n_kv_heads": 1, "head_dim": 32, "hidden_size": HIDDEN, "ffn_size": FFN, "vocab_size": 258}
        check(dict(f.attrs) == expected, "attributes of the file", str(dict(f.attrs)))
        names = {}
        for block in (1, 3):
            for site, (n, k) in SHAPES.items():
                names[f"block-{block:02d}/{site}/w"] = ((n, k), (block, site, "w", 5, 0))
                for update in (6, 7):
                    sample = (update - 1) * BATCH
                    at = f"block-{block:02d}/{site}/update-{update:08d}/"
                    names[at + "x"] = ((TOKENS, k), (block, site, "x", update, sample))
                    names[at + "dy"] = ((TOKENS, n), (block, site, "dy", update, sample))
        there = datasets(f)
        check(set(there) == set(names), "datasets", str(sorted(set(there) ^ set(names))))
        for name, (shape, words) in names.items():
            d, a = there[name], there[name].attrs
            check(d.shape == shape, f"{name}: shape {d.shape}")
            check(d.id.get_type().get_size() == 2 and a["dtype"] == 2, f"{name}: is BF16")
            found = (a["layer"], a["site"], a["tensor"], a["update"], a["first_sample"])
            check(found == words and a["route"] == "bf16", f"{name}: attributes {found}")
            values = d[()]
            check(numpy.isfinite(values).all() and values.any(), f"{name}: values")


def test_weights_are_the_checkpoints():
    with first() as f, h5py.File(glob.glob(place.at(place.step("run", 5), "rank-*.h5"))[0], "r") as k:
        for block in (1, 3):
            for site, parts in META.items():
                w = numpy.concatenate([k[f"master/layers.{block - 1}.{p}.weight"][()] for p in parts])
                check(numpy.array_equal(to_bf16(w), f[f"block-{block:02d}/{site}/w"][()].astype(numpy.float32)), f"{block} {site}")


def test_batches_differ_and_repeat():
    with first() as f:
        a, b = (f[f"block-01/qkv/update-{u:08d}/x"][()] for u in (6, 7))
        check(not numpy.array_equal(a, b), "two updates read two batches")
    capture("again.h5", "--layers", "3,1", "--updates", "2").expect(DONE)
    with first() as f, h5py.File(place.at("again.h5"), "r") as g:
        x, y = datasets(f), datasets(g)
        check(set(x) == set(y) and all(numpy.array_equal(x[n][()], y[n][()]) for n in x), "the same file again")


def test_independent_of_recomputation_and_route():
    """The model runs under bf16 whatever the configuration says."""
    capture("other.h5", "--layers", "1,3", "--updates", "2", "--set", "train.recompute=all", "--set", "route=bf16").expect(DONE)
    with first() as f, h5py.File(place.at("other.h5"), "r") as g:
        x, y = datasets(f), datasets(g)
        check(all(numpy.array_equal(x[n][()], y[n][()]) for n in x), "the same tensors")
        check(g.attrs["trained_route"] == "mxfp4-row-sr", "the checkpoint's route")


def test_default_layers():
    capture("default.h5").expect(DONE, "36 tensors")
    with h5py.File(place.at("default.h5"), "r") as f:
        check(sorted(f) == ["block-01", "block-02", "block-03"], str(sorted(f)))


def test_failure_keeps_the_old_file():
    """The file is whole or not at all: a disk that fills up leaves the one of before."""
    capture("kept.h5").expect(DONE)
    with open(place.at("kept.h5"), "rb") as f:
        before = f.read()
    out = place.command("capture", "run", "tiny.yaml", "--out", "kept.h5",
                        prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000)))
    out.expect(CHECKPOINT, r"cannot write kept\.h5\.tmp: File too large")
    with open(place.at("kept.h5"), "rb") as f:
        check(f.read() == before, "the file of before")
    check(not os.path.exists(place.at("kept.h5.tmp")), "no temporary is left")


def test_refused():
    capture("x.h5", "--layers", "4").expect(USAGE, "the model has blocks 1 to 3")
    capture("x.h5", "--layers", "1,").expect(USAGE, "numbers like 1,4")
    capture("x.h5", "--layers", "0").expect(USAGE, "blocks 1 to 3")
    capture("nowhere/x.h5").expect(CHECKPOINT, r"cannot write nowhere/x.h5\.tmp: No such file")
    capture("x.h5", checkpoint="absent").expect(CHECKPOINT, "no checkpoint in absent")
    place.command("capture", "run", "tiny.yaml").expect(USAGE, "--out is missing")
    place.command("capture", "run", "absent.yaml", "--out", "x.h5").expect(CONFIG)
    place.command("capture", "run", "tiny.yaml", "--out", "x.h5", np=2).expect(USAGE, "capture runs in one process, 2 were started")
    check(not os.path.exists(place.at("x.h5")), "nothing is left behind")


def test_inspect():
    first().close()
    place.command("inspect", "c.h5", "--verify").expect(DONE, r"a capture of a model's linears\n.*40, ", "every slice can be read")


# ---- bench quantize -----------------------------------------------------------


def bench(*arguments):
    first().close()
    r = place.command("bench", "quantize", "--from", "c.h5", "--json", "--repeat", "1", *arguments).expect(DONE)
    return [json.loads(line) for line in r.text.splitlines()]


def e2m1(x):
    """Nearest, ties to even codes."""
    grid = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    a = numpy.minimum(numpy.abs(x), 6)
    d = numpy.abs(a[..., None] - grid)
    best = d.min(-1, keepdims=True)
    near = d == best
    code = numpy.where(near[..., 0::2].any(-1), 2 * near[..., 0::2].argmax(-1), 2 * near[..., 1::2].argmax(-1) + 1)
    return numpy.sign(x) * grid[code], code


def mx_rows(z):
    """1x32 along the last axis, encode-centric; the decoded values and the codes."""
    g = z.astype(numpy.float64).reshape(z.shape[0], -1, 32)
    a = numpy.abs(g).max(-1, keepdims=True)
    s = numpy.exp2(numpy.ceil(numpy.log2(numpy.where(a > 0, a, 1))))
    q, code = e2m1(6 * g / s)
    return (q * s / 6).reshape(z.shape), code.reshape(z.shape)


def mx_tiles(w):
    """32x32, s halved where amax/s < 0.87."""
    n, k = w.shape
    g = w.astype(numpy.float64).reshape(n // 32, 32, k // 32, 32).transpose(0, 2, 1, 3)
    a = numpy.abs(g).max((-1, -2), keepdims=True)
    s = numpy.exp2(numpy.ceil(numpy.log2(a)))
    s = numpy.where(a / s < 0.87, s / 2, s)
    q, _ = e2m1(6 * g / s)
    return (q * s / 6).transpose(0, 2, 1, 3).reshape(n, k)


def close(a, b, what, tolerance=2e-5):
    check(abs(a - b) <= tolerance * abs(b), f"{what}: {a}, expected {b}")


def contraction(row, site, update=6, block=1):
    with first() as f:
        read = lambda name: f[f"block-{block:02d}/{site}/{name}"][()].astype(numpy.float64)
        return read(f"update-{update:08d}/x"), read("w"), read(f"update-{update:08d}/dy")


def check_row(row, measured, exact, what):
    error, energy, cross = ((measured - exact) ** 2).sum(), (exact ** 2).sum(), (measured * exact).sum()
    close(row["error_energy"], error, what + " error", 1e-4)
    close(row["reference_energy"], energy, what + " energy", 1e-4)
    close(row["relative_l2"], (error / energy) ** 0.5, what + " relative L2", 1e-4)
    close(row["cosine"], cross / (energy * (measured ** 2).sum()) ** 0.5, what + " cosine")
    close(row["gain"], cross / energy, what + " gain")


def test_figures():
    rows = bench("--route", "mxfp4-row-sr")
    found = {(r["update"], r["layer"], r["site"], r["contraction"]): r for r in rows if r["row"] == "contraction"}
    check(len(found) == 2 * 2 * 4 * 3, "a row each", str(len(found)))
    for site in SHAPES:
        for block, update in ((1, 6), (3, 7)):
            x, w, dy = contraction(None, site, update, block)
            (qx, codes), qw = mx_rows(x), mx_tiles(w)
            qx_t, qdy_t = mx_rows(x.T)[0], mx_rows(dy.T)[0]
            row = found[update, block, site, "fprop"]
            check_row(row, qx @ qw.T, x @ w.T, site + " fprop")
            close(row["a"]["relative_l2"], ((qx - x) ** 2).sum() ** 0.5 / (x ** 2).sum() ** 0.5, site + " x")
            close(row["b"]["relative_l2"], ((qw - w) ** 2).sum() ** 0.5 / (w ** 2).sum() ** 0.5, site + " w")
            close(row["a"]["underflowed"], ((codes == 0) & (x != 0)).mean(), site + " underflowed")
            check(row["a"]["saturated"] == 0 and row["a"]["operand"] == "fprop x", "the encode rule clips nothing")
            check(row["a"]["encoding"] == "mxfp4/1x32/encode" and row["b"]["encoding"] == "mxfp4/2d32/adaptive", str(row))
            row = found[update, block, site, "wgrad"]
            check_row(row, qdy_t @ qx_t.T, dy.T @ x, site + " wgrad")
            close(row["a"]["relative_l2"], ((qdy_t - dy.T) ** 2).sum() ** 0.5 / (dy ** 2).sum() ** 0.5, site + " dy")
            # Stochastic: about twice the energy of rounding to nearest, in dY alone.
            row = found[update, block, site, "dgrad"]
            nearest = ((mx_rows(dy)[0] - dy) ** 2).sum() / (dy ** 2).sum()
            check(1.5 < row["a"]["relative_l2"] ** 2 / nearest < 2.6, f"{site}: SR {row['a']['relative_l2'] ** 2 / nearest}")
            close(row["b"]["relative_l2"], found[update, block, site, "fprop"]["b"]["relative_l2"], "one W", 1e-12)

    for c in ("fprop", "dgrad", "wgrad"):
        own = [r for key, r in found.items() if key[3] == c]
        pooled = next(r for r in rows if r["row"] == "summary" and r["contraction"] == c)
        check(pooled["linears"] == 16, "linears")
        close(pooled["relative_l2"], (sum(r["relative_l2"] ** 2 for r in own) / 16) ** 0.5, "pooled", 1e-12)
        close(pooled["gain"], sum(r["gain"] for r in own) / 16, "pooled gain", 1e-12)


def test_ratios():
    """Two rows of one route, and plain ones that have no error."""
    rows = bench("--route", "bf16", "--route", "mxfp4-row-sr", "--route", "fp32")
    for r in rows:
        if r["row"] == "contraction" and r["route"] != "mxfp4-row-sr":
            check(r["relative_l2"] == 0 and r["cosine"] == 1 and r["gain"] == 1, str(r))
    ratios = [r for r in rows if r["row"] == "energy_ratio"]
    check(len(ratios) == 3 and all(r["over"] == {"mxfp4-row-sr": 1.0} for r in ratios), str(ratios))


def test_speed():
    rows = [r for r in bench("--route", "mxfp4-row-sr") if r["row"] == "speed"]
    check([r["tensor"] for r in rows] == ["x", "w", "dy"], str(rows))
    for r in rows:
        close(r["bytes_per_second_per_core"] * r["seconds"], 2 * r["rows"] * r["cols"], "bytes", 1e-9)


def test_every_executable_route():
    """All that quantise; the others are named with their reason."""
    rows = bench()
    names = {r["route"] for r in rows if r["row"] == "summary"}
    left = {r["route"]: r["why"] for r in rows if r["row"] == "left_out"}
    check("mxfp4-row-sr" in names and "bf16" not in names and not names & set(left), f"{names} {left}")
    check("blocks" in left["depth-27-5"], "three blocks are too few for it")
    for r in rows:
        if r["row"] == "contraction":
            check(0.01 < r["relative_l2"] < 0.6 and 0.85 < r["gain"] < 1.15 and r["cosine"] > 0.8, str(r))
            for o in (r["a"], r["b"]):
                check(0.01 < o["relative_l2"] < 0.6 or o["encoding"] == "bf16", str(o))


def test_projections_alone():
    """A route that leaves the FFN in BF16: its linears have their own encodings."""
    rows = [r for r in bench("--route", "attention-fp8-proj-nvfp4") if r["row"] == "contraction"]
    seen = {(r["site"], r["contraction"]): (r["a"]["encoding"], r["b"]["encoding"], r["relative_l2"]) for r in rows}
    for site in ("qkv", "out"):
        check(seen[site, "fprop"][:2] == ("nvfp4/1x16/tensor", "nvfp4/2d16/tensor") and seen[site, "fprop"][2] > 0.01, f"{site}: {seen}")
        check(seen[site, "dgrad"][:2] == ("nvfp4/1x16/tensor", "nvfp4/2d16/tensor") and seen[site, "wgrad"][2] == 0, f"{site}: {seen}")
    check(all(seen[site, c] == ("bf16", "bf16", 0) for site in ("gate_up", "down") for c in ("fprop", "dgrad", "wgrad")), f"FFN: {seen}")


def test_damaged():
    def altered(change):
        first().close()
        shutil.copy(place.at("c.h5"), place.at("d.h5"))
        with h5py.File(place.at("d.h5"), "r+") as f:
            change(f)
        return place.command("bench", "quantize", "--from", "d.h5")

    def renamed(f):
        del f.attrs["format"]

    def missing(f):
        del f.attrs["seq_len"]

    def impossible(f):
        f.attrs["hidden_size"] = 0

    def other_shape(f):
        f.attrs["ffn_size"] = 96

    def no_gradient(f):
        del f["block-01/qkv/update-00000006/dy"]

    def no_site(f):
        f["block-01/qkv/w"].attrs["site"] = "router"

    altered(renamed).expect(DATA, "is not a capture")
    altered(missing).expect(DATA, "attribute seq_len is missing or impossible")
    altered(impossible).expect(DATA, "attribute hidden_size is missing or impossible")
    altered(other_shape).expect(DATA, "is not a captured tensor of this model")
    altered(no_gradient).expect(DATA, "update-00000006/x has no W or no dY beside it")
    altered(no_site).expect(DATA, "block-01/qkv/w is not a captured tensor")
    place.command("bench", "quantize", "--from", "absent.h5").expect(DATA, "absent.h5")
    place.command("bench", "quantize", "--from", "tiny.yaml").expect(DATA, "tiny.yaml")
    place.command("bench", "quantize").expect(USAGE, "--from is missing")
    place.command("bench", "quantize", "--from", "c.h5", "--route", "nothing").expect(CONFIG, "nothing")
    place.command("bench", "quantize", "--from", "c.h5", "--route", "depth-27-5").expect(CONFIG, "outside the model's blocks")


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
