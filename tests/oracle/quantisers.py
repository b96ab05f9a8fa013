"""Golden quantised operands for tests/cpu_quantisers_oracle_test.c.

    FP4D_ORACLE_SOURCES=DIR python tests/oracle/quantisers.py tests/golden/quantisers.txt

Every expectation is made by tests/oracle/quantiser_model.py; where a published
reference defines the same thing it is run on the same input, and anything it
says differently, beyond what `references` spells out, stops the script.  The
last field of a line names the references that agreed ("model": none exists).

A line:  INPUT ROWS COLS  VIEW FORMAT BLOCK SCALE ROUNDING HADAMARD ENCODING-STRIP  STRIP SEGMENT  NAME
         CODES SCALES OUTER  SUM MAGNITUDE  FIRST-CODES FIRST-SCALES FIRST-OUTER  AGREED
Enumerations are kernels/encoding.h's numbers.  CODES, SCALES (tiled, with their
padding) and OUTER are the low 64 bits of XXH3-128 over the bytes.  SUM is that of
decoded values times (7 row + 3 column) mod 11 - 5, MAGNITUDE that of their
magnitudes (0 0: not all finite).  FIRST is what the first elements of row 0 got,
for a reader.
"""
import sys

import ml_dtypes
import numpy as np
import quantiser_inputs as inputs
import quantiser_model as model
import quantiser_references as reference
import xxhash
from quantiser_model import F32, bf16_value

DRAW = {"seed": 0x0123456789ABCDEF, "update": 77, "first_sample": 0x12FFFFFFFF, "layer": 5, "operand": 3}

FORMATS = {"e4m3": 3, "e5m2": 4, "mxfp4": 5, "nvfp4": 6, "nvfp4-local": 7}
BLOCKS = {"": 0, "1x16": 1, "1x32": 2, "2d16": 3, "2d32": 4}
SCALES = {"encode": 1, "decode": 2, "floor": 3, "adaptive": 4, "tensor": 5, "faithful": 6, "pow2": 7, "row": 8, "4over6": 9}
HADAMARDS = {"": 0, "plain-16": 1, "signed-16": 2, "signed-32": 3}


class Case:
    """One encoding: format/block/scale, then strip, sr and a transform, as encoding_text prints them."""

    def __init__(self, format, block, scale, strip=0, sr=False, hadamard=""):
        self.format, self.block, self.scale, self.strip, self.sr, self.hadamard = format, block, scale, strip, sr, hadamard
        words = [format, block, scale, f"strip{strip}" if strip else "", "sr" if sr else "", hadamard]
        self.name = "/".join(w for w in words if w)
        self.outer_strip = 1 if scale == "row" else strip  # rows that share an outer factor; 0: all
        self.tile = int(block[2:]) if block.startswith("2d") else 0

    def numbers(self):
        return (FORMATS[self.format], BLOCKS[self.block], SCALES[self.scale], int(self.sr), HADAMARDS[self.hadamard], self.strip)


def cases():
    """Every encoding that the table of routes or a custom route can name."""
    for hadamard in HADAMARDS:
        for sr in (False, True):
            for scale in ("encode", "decode", "floor"):
                yield Case("mxfp4", "1x32", scale, sr=sr, hadamard=hadamard)
            yield Case("nvfp4", "1x16", "tensor", sr=sr, hadamard=hadamard)
            for scale in ("faithful", "pow2"):
                yield Case("nvfp4-local", "1x16", scale, strip=128, sr=sr, hadamard=hadamard)
        for format in ("e4m3", "e5m2"):
            for scale in ("tensor", "row"):
                yield Case(format, "", scale, hadamard=hadamard)
    yield Case("mxfp4", "2d32", "adaptive")
    for scale in ("tensor", "4over6"):
        yield Case("nvfp4", "2d16", scale)
    yield Case("nvfp4", "1x16", "4over6")
    for scale in ("faithful", "pow2"):
        yield Case("nvfp4-local", "1x16", scale, strip=256)
        for sr in (False, True):  # one strip, the whole view
            yield Case("nvfp4-local", "1x16", scale, sr=sr)
        yield Case("nvfp4-local", "2d16", scale)


def quantise(case, z, field, strip, segment):
    if case.format == "mxfp4":
        return model.mx(z, case.scale, case.tile, field)
    if case.format == "nvfp4":
        return model.nvfp4(z, case.tile, field, case.scale == "4over6")
    if case.format in ("e4m3", "e5m2"):
        return model.fp8(z, case.format, case.scale)
    return model.local(z, case.scale, case.tile, field, strip, segment)


def same(what, case, name, mine, theirs):
    if not np.array_equal(mine, theirs):
        bad = np.argwhere(np.asarray(mine) != np.asarray(theirs))
        sys.exit(f"{case.name} on {name}: {what}: {len(bad)} of {np.size(mine)} differ, first at {bad[0]}")


def unsigned_zero(codes):
    """Transformer Engine's Python reference gives -0 the code of +0; the instruction keeps the sign."""
    return np.where(codes == 8, 0, codes)


def check_transform(case, name, source, z):
    """Against the matrix in float64, and for the signed 16 against torchao bit for bit."""
    n = int(case.hadamard[-2:])
    i = np.arange(n)
    matrix = np.where(np.bitwise_count(i[:, None] & i) & 1, -1.0, 1.0) / np.sqrt(n)
    if case.hadamard.startswith("signed"):
        matrix = np.where(0x2817 >> (i % 16) & 1, 1.0, -1.0)[:, None] * matrix
    x = bf16_value(source).astype(np.float64).reshape(-1, n)
    exact, sums = (x @ matrix).reshape(z.shape), (np.abs(x) @ np.abs(matrix)).reshape(z.shape)
    if (np.abs(z - exact) > 2.0**-8 * np.abs(exact) + 2.0**-21 * sums).any():
        sys.exit(f"{case.name} on {name}: the transform is not the matrix's")
    if case.hadamard == "signed-16":
        same("torchao's transform", case, name, z, reference.rht_torchao(bf16_value(source)))


def references(case, name, z, o):
    """Runs what exists for this encoding on z (already transformed); names of those that agreed."""
    if case.sr or name == "nonfinite":
        return []
    if case.format == "mxfp4" and not case.tile:
        if case.scale == "floor":
            codes, scales = reference.mx_torchao(z, "FLOOR")
            codes = np.where(model.spread(model.block_amax(z, 1, 32) == 0, 1, 32, z.shape), codes & 7, codes)
            same("torchao codes", case, name, o.codes, codes)
            same("torchao scales", case, name, o.scales, scales)
            same("microxcaling", case, name, o.value.astype(F32), reference.mx_microxcaling(z))
            return ["torchao", "microxcaling"]
        if case.scale == "encode":
            # codes of 6 z / 2^ceil(log2 a) are those of RCEIL on 6 z; large blocks are scaled
            # down so that 6 z is finite.  Bytes below 2 are ours to refuse: 6 / s is to be finite.
            big = model.spread(model.block_amax(z, 1, 32) > 2.0**64, 1, 32, z.shape)
            codes, scales = reference.mx_torchao(np.where(big, z * F32(2.0**-8), z) * F32(6), "RCEIL")
            scales = scales + 8 * big[:, ::32]
            scales = np.where(model.block_amax(z, 1, 32) > 2.0**127, 254, scales)  # 2^128 is no E8M0 number
            usual = (scales >= 2) & (model.block_amax(z, 1, 32) <= 2.0**127) | (o.scales == 0)
            wide = model.spread(usual, 1, 32, z.shape)
            codes = np.where(model.spread(o.scales == 0, 1, 32, z.shape), codes & 7, codes)  # zeros of either sign
            same("torchao RCEIL of 6z, codes", case, name, o.codes[wide], codes[wide])
            same("torchao RCEIL of 6z, scales", case, name, o.scales[usual], scales[usual])
            return ["torchao"] if usual.any() else []
        amax = model.block_amax(z, 1, 32)
        usual = (amax <= 2.0**125) & (amax >= 2.0**-124) | (amax == 0)
        small = np.where(model.spread(usual, 1, 32, z.shape), z, F32(0))
        _, scales = reference.mx_torchao(small * F32(4), "FLOOR")
        same("torchao FLOOR of 4z, scales", case, name, o.scales[usual], scales[usual])
        return ["torchao"] if usual.any() else []
    if case.format == "nvfp4":

        def live(codes, scales):  # literally, nonzero elements under scale 0 get code 7; ours get 0
            return np.where(model.spread(scales == 0, 1, 16, z.shape), 0, codes)

        four_over_six = case.scale == "4over6"
        codes, scales, _, _ = reference.nvfp4_te(z, case.tile, four_over_six=four_over_six, bound=256)
        same("Transformer Engine scales", case, name, o.scales, scales)
        same("Transformer Engine codes", case, name, unsigned_zero(o.codes), unsigned_zero(live(codes, scales)))
        if four_over_six:
            return ["te"]
        codes, scales = reference.nvfp4_torchao(z, case.tile)
        same("torchao scales", case, name, o.scales, scales)
        same("torchao codes", case, name, o.codes, live(codes, scales))
        return ["torchao", "te"]
    if case.format in ("e4m3", "e5m2"):
        # the cast alone: packages saturate differently, so it is done for them
        dtype, largest = (ml_dtypes.float8_e4m3fn, 448) if case.format == "e4m3" else (ml_dtypes.float8_e5m2, 57344)
        scaled = z * (model.fp8_scale(z, case.format, case.scale)[1])
        codes = np.clip(scaled, -largest, largest).astype(dtype).view(np.uint8)
        same("ml_dtypes codes", case, name, o.codes, codes)
        return ["ml_dtypes"]
    return []


def stored(case, o):
    if case.format in ("e4m3", "e5m2"):
        return o.codes
    return model.pack(o.codes)


def sums(value):
    r, c = np.meshgrid(*(np.arange(n) for n in value.shape), indexing="ij")
    if not np.isfinite(value).all():
        return "0", "0"
    return f"{(value * ((7 * r + 3 * c) % 11 - 5)).sum():.17g}", f"{np.abs(value).sum():.17g}"


def digest(data):
    return f"{xxhash.xxh3_128_intdigest(data) & 0xFFFFFFFFFFFFFFFF:016x}"


def shapes(case, name):
    """(rows, cols, then of each view strip and segment) of the source."""
    own = (case.outer_strip, 0)
    if name in ("bell", "heavy", "chunks"):
        yield 256, 384, own, own
    else:
        yield 128, 256, own, own
    if name == "bell":
        yield (224, 352, own, own) if case.format == "nvfp4-local" else (96, 160, own, own)
    if name in ("heavy", "sparse", "outlier", "nonfinite") and not case.tile:
        yield 77, 352 if case.format == "nvfp4-local" else 96, own, own  # the row view alone
    if name in ("bell", "chunks") and case.format == "nvfp4-local" and not case.hadamard:
        # two arms: of dY along its columns, of W along its rows (kernels/kernels.h, struct operand)
        if case.tile:
            yield 160, 384, (80, 0), (0, 80)
        elif case.strip == 128:
            yield 256, 384, (128, 192), (128, 0)


def views(case, rows):
    """Draws belong to rows, but for Transformer Engine's recipe; columns are contracted by 16 or 32."""
    return (0,) if rows % 32 or case.sr and case.format != "nvfp4" else (0, 1)


def suits(case, name):
    if case.hadamard and name in ("words", "nonfinite"):
        return False  # sums overflow: what is not finite is found before it is quantised
    if case.sr or case.hadamard:
        return name in ("bell", "chunks", "heavy", "wide", "tiny", "huge", "sparse", "lattice")
    return True


def main(path):
    lines, agreed = [], {}
    for name in inputs.NAMES:
        for case in cases():
            if not suits(case, name):
                continue
            for rows, cols, *outers in shapes(case, name):
                source = inputs.values(name, rows, cols)
                draw = dict(DRAW, seq_len=rows // 2)
                for view in views(case, rows):
                    strip, segment = outers[view]
                    seen = source.T.copy() if view else source
                    z = bf16_value(model.hadamard(seen, case.hadamard))
                    if case.hadamard:
                        check_transform(case, name, seen, z)
                    field = model.fields(draw, rows, cols, view == 1) if case.sr else None
                    with np.errstate(invalid="ignore"):
                        o = quantise(case, z, field, strip, segment)
                    by = references(case, name, z, o)
                    scales = o.scales if o.scales is not None else np.zeros((rows, 0), np.uint8)
                    tiled = reference.swizzle(scales) if scales.size else scales
                    codes = stored(case, o)
                    outer = o.outer if o.outer is not None else np.zeros((0, 0), F32)
                    agreed.setdefault((case.name, "+".join(by) or "model"), []).append(name)
                    lines.append(
                        " ".join(
                            str(x)
                            for x in (
                                name, rows, cols, view, *case.numbers(), strip, segment, case.name,
                                digest(codes.tobytes()), digest(tiled.tobytes()), digest(outer.tobytes()),
                                *sums(o.value),
                                codes[0, :8].tobytes().hex(), scales[0, :4].tobytes().hex() or "-",
                                "".join(f"{w:08x}" for w in outer.reshape(-1)[:2].view(np.uint32)) or "-",
                                "+".join(by) or "model",
                            )
                        )
                    )  # fmt: skip
    with open(path, "w") as f:
        f.write("# made by tests/oracle/quantisers.py\n" + "\n".join(lines) + "\n")
    for (case, by), names in agreed.items():
        print(f"{case:40s} {by:24s} {' '.join(sorted(set(names)))}")


if __name__ == "__main__":
    main(sys.argv[1])
