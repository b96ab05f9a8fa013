#!/usr/bin/python3
"""bench quantize on a capture that h5py wrote: the errors of every route's operands and contractions,
computed again from an independent model of the quantisers (tests/oracle/quantiser_model.py), draws included.

Prints "ok NAME" or "not ok NAME: why" for each test; exit status 0 iff all are ok.  Without h5py
(Debian: python3-h5py): "ok ... # skipped".
"""
import functools
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "oracle")]
from fp4d import DONE, H5PY_PYTHON, LIMIT, ROOT, Place, check, main

try:
    import h5py
    import numpy
    import quantiser_model as model
except ImportError:
    if os.path.exists(H5PY_PYTHON) and not os.environ.get("FP4D_TEST_PYTHON"):
        os.environ["FP4D_TEST_PYTHON"] = "1"
        os.execv(H5PY_PYTHON, [H5PY_PYTHON, os.path.abspath(__file__)] + sys.argv[1:])
    print("ok trainer_quality # skipped: no h5py")
    sys.exit(0)

BATCH, SEQ, HIDDEN, FFN, LAYERS = 2, 128, 128, 256, 8
TOKENS = BATCH * SEQ
UPDATE, SAMPLE, SEED = 37, 4096, 1234
SITES = {"out": (HIDDEN, HIDDEN, 2), "gate_up": (2 * FFN, HIDDEN, 3)}  # n, k, who draws
BLOCKS = (1, 8)

place = Place()


# ---- the capture ---------------------------------------------------------------


def bf16_type():
    t = h5py.h5t.IEEE_F32LE.copy()
    t.set_fields(15, 7, 8, 0, 7)
    t.set_size(2)
    t.set_ebias(127)
    return t


def tensor(key, rows, cols, scale):
    """Heavy tails, columns of their own size, one in eight of the rows 64 times larger, a few zeros."""
    r = numpy.random.default_rng(key)
    x = r.standard_t(3, (rows, cols)) * numpy.exp2(r.integers(-3, 3, (1, cols))) * scale
    x = x * numpy.where(r.random((rows, 1)) < 0.125, 64, 1) * (r.random((rows, cols)) > 0.01)
    x[5, :64] = 0  # whole blocks
    return model.bf16_value(model.bf16(x.astype(numpy.float32)))


def tensors():
    """By block and site: X, W, dY."""
    return {(block, site): (tensor([block, n, 0], TOKENS, k, 1.0), tensor([block, n, 1], n, k, 0.02),
                            tensor([block, n, 2], TOKENS, n, 1e-6))
            for block in BLOCKS for site, (n, k, _) in SITES.items()}


def write(path):
    numbers = {"version": 1, "n_layers": LAYERS, "tokens": TOKENS, "batch": BATCH, "seq_len": SEQ, "n_heads": 4, "n_kv_heads": 2,
               "head_dim": 32, "hidden_size": HIDDEN, "ffn_size": FFN, "vocab_size": 512, "seed": SEED, "update": UPDATE - 1}

    def attribute(where, name, value):
        where.attrs.create(name, value, dtype=h5py.string_dtype() if isinstance(value, str) else "int64")

    with h5py.File(path, "w", libver=("v110", "v110")) as f:
        for name, value in {**numbers, "format": "fp4d-capture", "route": "bf16", "trained_route": "bf16"}.items():
            attribute(f, name, value)
        for (block, site), three in tensors().items():
            for name, x in zip("x w dy".split(), three):
                at = f"block-{block:02d}/{site}/" + ("w" if name == "w" else f"update-{UPDATE:08d}/{name}")
                group = f.require_group(os.path.dirname(at))
                space = h5py.h5s.create_simple(x.shape)
                d = h5py.h5d.create(group.id, os.path.basename(at).encode(), bf16_type(), space)
                d.write(h5py.h5s.ALL, h5py.h5s.ALL, numpy.ascontiguousarray(x))
                own = {"global_rows": x.shape[0], "cols": x.shape[1], "first_row": 0, "dtype": 2, "layer": block, "site": site,
                       "tensor": name, "update": UPDATE - (name == "w"), "first_sample": 0 if name == "w" else SAMPLE, "route": "bf16"}
                for key, value in own.items():
                    attribute(h5py.Dataset(d), key, value)


# ---- the model -------------------------------------------------------------------


def matrix(kind):
    n = int(kind[-2:])
    i = numpy.arange(n)
    signs = numpy.array([[(-1.0) ** bin(a & b).count("1") for b in i] for a in i]) / n ** 0.5
    if kind.startswith("signed"):
        signs = numpy.where(0x2817 >> (i % 16) & 1, 1.0, -1.0)[:, None] * signs
    return signs


class Quantised:
    """An operand of `source` by the words of its encoding; value has the transform undone, raw has not."""

    def __init__(self, words, role, source, block, site):
        n, arm = source.size, FFN if site == "gate_up" and not role.endswith("x") else 0
        column = role in ("dgrad w", "wgrad dy", "wgrad x")
        z = source.T.copy() if column else source
        self.exact = z.astype(numpy.float64)
        part = words.split("/")
        self.share = {"saturated": 0.0, "underflowed": 0.0, "zero_blocks": 0.0}
        if words in ("bf16", "fp32"):
            self.value = self.raw = self.exact
            return
        hadamard = part.pop() if part[-1][-2:] in ("16", "32") and "-" in part[-1] else ""
        field = None
        if part[-1] == "sr":
            part.pop()
            draw = {"seed": SEED, "update": UPDATE, "first_sample": SAMPLE, "seq_len": SEQ, "layer": block - 1,
                    "operand": SITES[site][2]}
            field = model.fields(draw, *source.shape, column)
        strip = int(part.pop()[5:]) if part[-1].startswith("strip") else 0
        z = model.bf16_value(model.hadamard(model.bf16(z), hadamard))
        tile = int(part[1][2:]) if part[1].startswith("2d") else 0
        if part[0] == "mxfp4":
            o = model.mx(z, part[2], tile, field)
        elif part[0] == "nvfp4":
            o = model.nvfp4(z, tile, field, part[2] == "4over6")
        elif part[0] == "nvfp4-local":
            along_rows = role == "fprop w" or role == "wgrad dy"
            if arm and along_rows and not strip:
                strip = arm
            o = model.local(z, part[2], tile, field, strip, arm if arm and not along_rows else 0)
        else:
            o = model.fp8(z, part[0], part[1])
        self.raw = self.value = o.value
        if hadamard:
            h = matrix(hadamard)
            self.value = (o.value.reshape(-1, len(h)) @ h.T).reshape(z.shape)
        self.share["saturated"] = o.beyond.mean()
        self.share["underflowed"] = ((o.codes & (0x7F if part[0][0] == "e" else 7)) == 0)[z != 0].sum() / n
        if part[0][0] != "e":
            width = 32 if part[0] == "mxfp4" else 16
            self.share["zero_blocks"] = (model.block_amax(z, tile or 1, width) == 0).mean()

    def relative(self):
        return (((self.value - self.exact) ** 2).sum() / (self.exact ** 2).sum()) ** 0.5


def close(a, b, what, tolerance):
    check(abs(a - b) <= tolerance * max(abs(b), 1e-30), f"{what}: {a}, expected {b}")


CONTRACTIONS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


@functools.cache
def rows():
    write(place.at("c.h5"))
    r = place.command("bench", "quantize", "--from", "c.h5", "--json", "--repeat", "1").expect(DONE)
    return [json.loads(line) for line in r.text.splitlines()]


@functools.cache
def operands():
    """By encoding, role, block and site, each with what the program says of it."""
    x, seen = tensors(), {}
    for r in rows():
        if r["row"] != "contraction":
            continue
        source = dict(zip(("x", "w", "dy"), x[r["layer"], r["site"]]))
        for o in (r["a"], r["b"]):
            key = (o["encoding"], o["operand"], r["layer"], r["site"])
            if key not in seen:
                seen[key] = Quantised(o["encoding"], o["operand"], source[o["operand"].split()[1]], r["layer"], r["site"]), []
            seen[key][1].append(o)
    return seen


def test_operands():
    """Relative L2 of every operand of every route, shares of saturated and underflowed elements."""
    for key, (q, said) in operands().items():
        what = " ".join(map(str, key))
        for o in said:
            close(o["relative_l2"], q.relative(), what + " relative L2", 1e-6)
            for name, share in q.share.items():
                check(abs(o[name] - share) < 1e-12, f"{what}: {name} {o[name]}, expected {share}")
    names = sorted({key[0] for key in operands()})
    check(len(names) >= 15, f"encodings: {names}")


def test_contractions():
    """Relative L2, cosine, gain and energies of every route's fprop, dgrad and wgrad."""
    n, exact = 0, {}
    for r in rows():
        if r["row"] != "contraction":
            continue
        a, b = (operands()[r[side]["encoding"], r[side]["operand"], r["layer"], r["site"]][0] for side in "ab")
        place_of = r["layer"], r["site"], r["contraction"]
        if place_of not in exact:
            exact[place_of] = a.exact @ b.exact.T
        y, z = exact[place_of], a.raw @ b.raw.T
        error, energy, own, cross = ((z - y) ** 2).sum(), (y * y).sum(), (z * z).sum(), (z * y).sum()
        what = f"{r['route']} block {r['layer']} {r['site']} {r['contraction']}"
        close(r["reference_energy"], energy, what + " energy", 1e-5)
        if error == 0:
            check(r["error_energy"] == 0 and r["relative_l2"] == 0 and r["cosine"] == 1 and r["gain"] == 1, what)
        else:
            close(r["error_energy"], error, what + " error", 1e-4)
            close(r["relative_l2"], (error / energy) ** 0.5, what + " relative L2", 1e-4)
            close(r["cosine"], cross / (energy * own) ** 0.5, what + " cosine", 1e-6)
            close(r["gain"], cross / energy, what + " gain", 1e-6)
        n += 1
    check(n >= 13 * 2 * 2 * 3, f"{n} rows")


def test_routes_and_ratios():
    """Nothing of the ledger is left out; ratios are those of mean relative energies."""
    found = rows()
    check(not [r for r in found if r["row"] == "left_out"], str([r for r in found if r["row"] == "left_out"]))
    for c in CONTRACTIONS:
        energy = {}
        for r in found:
            if r["row"] == "contraction" and r["contraction"] == c:
                energy.setdefault(r["route"], []).append(r["error_energy"] / r["reference_energy"])
        mean = {k: sum(v) / len(v) for k, v in energy.items()}
        for r in found:
            if r["row"] == "energy_ratio" and r["contraction"] == c:
                for other, ratio in r["over"].items():
                    close(ratio, mean[r["route"]] / mean[other], f"{c} {r['route']} over {other}", 1e-9)


def test_table():
    """scripts/quality_table.py writes the same numbers, and routes of equal operands once."""
    found = [r for r in rows() if r["row"] == "contraction"]
    with open(place.at("quality.json"), "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in found)
    table = [os.path.join(ROOT, "scripts", "quality_table.py")]
    done = subprocess.run(table + [place.at("quality.json")], capture_output=True, text=True, timeout=LIMIT)
    check(done.returncode == 0, done.stderr)
    blocks = [[[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
              for block in done.stdout.split("\n\n") if block.startswith("|")]
    check(len(blocks) == 5, "five tables")
    named = {name.strip("`"): row for row in blocks[0][2:] for name in row[0].split(", ")}
    check(set(named) == {r["route"] for r in found} and len(blocks[0]) - 2 < len(named), "all routes, some together")
    check(named["te-native"] is named["nvfp4-te/forward-bf16-tail"], "equal operands, one row")
    for at, c in enumerate(CONTRACTIONS):
        for route in ("te-native", "mxfp4-row-sr"):
            energy = [r["error_energy"] / r["reference_energy"] for r in found if r["contraction"] == c and r["route"] == route]
            close(float(named[route][1 + at]), (sum(energy) / len(energy)) ** 0.5, f"{c} {route}", 1e-3)
    energy = {name: [r["error_energy"] / r["reference_energy"] for r in found if r["contraction"] == "dgrad" and r["route"] == name]
              for name in ("mxfp4-row-sr", "nvfp4-local")}
    ratio = [row for row in blocks[1] if row[:2] == ["dgrad", "`mxfp4-row-sr` / `nvfp4-local`"]]
    close(float(ratio[0][2]), sum(energy["mxfp4-row-sr"]) / sum(energy["nvfp4-local"]), "energy ratio", 1e-3)
    for path, words in ((place.at("none.json"), "No such file"), (os.path.join(ROOT, "Makefile"), "holds no contraction")):
        done = subprocess.run(table + [path], capture_output=True, text=True, timeout=LIMIT)
        check(done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1, path, done.stderr)


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
