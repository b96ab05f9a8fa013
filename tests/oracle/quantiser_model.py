"""An independent NumPy model of every quantiser: encodings as kernels/encoding.h
names them, operands as kernels/kernels.h lays them out.

Written from the definitions (docs/numerics.md), never from the C sources:
codes are found by searching tables of values in float64, FP32 steps are
NumPy float32 operations.  tests/oracle/quantisers.py holds this model against
the packages it knows and writes what the C test reads.
"""
import numpy as np

F32, F64 = np.float32, np.float64
FLT_MAX = np.finfo(F32).max
SIXTH = F32(1) / F32(6)
BF16_MAX = F32(2.0**128 - 2.0**120)
M32 = np.uint64(0xFFFFFFFF)

# ---- formats -------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])
E5M2 = np.array([m * 2.0**-16 if e == 0 else (1 + m / 4) * 2.0 ** (e - 15) for e in range(31) for m in range(4)])


def nearest(x, table, sign_bit, nan):
    """Codes of float32 x: the nearest value of the table, ties to the even code, saturating."""
    a = np.abs(x.astype(F64))
    middle = (table[1:] + table[:-1]) / 2
    low = np.searchsorted(middle, a, side="left")  # a tie stays below
    at_tie = (low < len(middle)) & (middle[np.minimum(low, len(middle) - 1)] == a)
    code = low + (at_tie & (low % 2 == 1))
    code = code | np.where(np.signbit(x), sign_bit, 0)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def e2m1(x):
    return nearest(x, E2M1, 8, 7)


def e4m3(x):
    return nearest(x, E4M3, 0x80, 0x7F)


def e5m2(x):
    return nearest(x, E5M2, 0x80, 0x7F)


def e2m1_stochastic(x, field):
    """floor(65536 * place between two codes) + field >= 65536 goes up."""
    a = np.minimum(np.abs(np.nan_to_num(x.astype(F64), nan=7.0)), 6.0)
    low = np.minimum(np.searchsorted(E2M1, a, side="right") - 1, 6)
    place = (a - E2M1[low]) / (E2M1[low + 1] - E2M1[low])
    code = low + (np.floor(place * 65536) + field >= 65536)
    return np.where(np.isnan(x), 7, code | np.where(np.signbit(x), 8, 0)).astype(np.uint8)


def e2m1_value(code):
    return np.where(code & 8, -1.0, 1.0) * E2M1[code & 7]


def e4m3_value(code):
    return E4M3[code & 127]


def bf16(x):
    """float32 to BF16 words, nearest even."""
    u = np.asarray(x, F32).view(np.uint32)
    w = (u + np.uint32(0x7FFF) + (u >> 16 & 1)) >> 16
    return np.where(np.isnan(x), u >> 16 | 0x40, w).astype(np.uint16)


def bf16_value(word):
    return (word.astype(np.uint32) << 16).view(F32)


# ---- random bits ------------------------------------------------------------------


def philox(key, c0, c1, c2, c3):
    """Philox4x32-10: words [4, ...] at counters (c0, c1, c2, c3)."""
    c = list(np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in (c0, c1, c2, c3))))
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & M32, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & M32]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & M32, (k1 + np.uint64(0xBB67AE85)) & M32
    return np.stack(c)


def reverse16(x):
    return sum(((x >> i) & 1) << (15 - i) for i in range(16))


def fields(draw, rows, cols, column):
    """The 16-bit fields of a view of a source [rows, cols], as the view lies.

    draw: seed, update, first_sample, seq_len, layer, operand."""
    r, c = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    t, operand = r % draw["seq_len"], draw["operand"] + (32 if column else 0)
    if column:
        block, place = c * (draw["seq_len"] // 16) + t // 16, t % 16
    else:
        block, place = (t * cols + c) // 16, c % 16
    sample = draw["first_sample"] + r // draw["seq_len"]
    top = (sample >> 32 & 0xFF) << 24 | draw["layer"] << 12 | operand
    word = philox(draw["seed"], block, sample & 0xFFFFFFFF, draw["update"], top).astype(np.int64)
    word = np.take_along_axis(word, (place // 4)[None], 0)[0]
    low = (word >> 8 & 0xFF00) | (word & 0xFF)
    high = (word >> 16 & 0xFF00) | (word >> 8 & 0xFF)
    half = np.where(place % 4 < 2, low, high)
    field = np.where(place % 2 == 0, half, reverse16(half))
    return field.T if column else field


# ---- transforms --------------------------------------------------------------------


def hadamard(word, kind):
    """BF16 words [rows, cols], transformed along cols: "", "plain-16", "signed-16", "signed-32"."""
    if not kind:
        return word
    n = int(kind[-2:])
    x = bf16_value(word).reshape(-1, n)
    if kind.startswith("signed"):
        x = x * np.where(0x2817 >> (np.arange(n) % 16) & 1, F32(1), F32(-1))
    distance = 1
    while distance < n:
        x = x.reshape(-1, n // (2 * distance), 2, distance)
        x = np.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], 2)
        distance *= 2
    return bf16(x.reshape(word.shape) * F32(0.25 if n == 16 else 1 / np.sqrt(32)))


# ---- scales -----------------------------------------------------------------------


def block_amax(z, height, width):
    """|z| over height x width blocks, padded with zeros."""
    rows, cols = z.shape
    a = np.zeros((-(-rows // height) * height, -(-cols // width) * width), F32)
    a[:rows, :cols] = np.abs(z)
    return a.reshape(a.shape[0] // height, height, a.shape[1] // width, width).max((1, 3))


def spread(blocks, height, width, shape):
    return blocks.repeat(height, 0).repeat(width, 1)[: shape[0], : shape[1]]


def one_nan(x):
    """Any NaN as 7fc00000."""
    return np.where(np.isnan(x), F32(np.nan), x)


def power(e):
    return np.ldexp(1.0, np.asarray(e, np.int64))


def floor_log2(a):
    """floor(log2 a) of positive a, exactly."""
    return np.frexp(a.astype(F64))[1] - 1


def ceil_log2(a):
    f, e = np.frexp(a.astype(F64))
    return np.where(f == 0.5, e - 1, e)


class Operand:
    """codes [rows, cols], scales [rows, scale columns] (bytes), outer [strips, segments], value
    float64, beyond (where rounding began above the largest code)."""

    def __init__(self, codes, scales, outer, value, beyond):
        self.codes, self.scales, self.outer, self.value, self.beyond = codes, scales, outer, value, beyond


def cast(z, e, field):
    """E2M1 codes of z e, and where |z e| > 6."""
    t = z * e.astype(F32)
    return (e2m1(t) if field is None else e2m1_stochastic(t, field)), np.abs(t) > 6


def mx(z, rule, tile, field):
    """MXFP4: E8M0 byte a block; delta is what a code is multiplied by."""
    height = tile if tile else 1
    a = block_amax(z, height, 32)
    zero, bad = a == 0, ~np.isfinite(a)
    safe = np.where(zero | bad, F32(1), a)
    if rule == "floor":  # OCP: 2^(floor(log2 a) - 2), codes of z / 2^...
        byte = np.where(bad, 254, np.clip(floor_log2(safe) - 2 + 127, 0, 254))
        coefficient, delta = power(127 - byte), power(byte - 127)
    else:
        s = floor_log2(safe) if rule == "decode" else ceil_log2(safe)
        byte = np.clip(s + 127, 2, 254)
        if rule == "adaptive":
            byte = np.where((safe / power(byte - 127) < 0.87) & (byte > 2), byte - 1, byte)
        byte = np.where(bad, 254, byte)
        coefficient, delta = 6 * power(127 - byte), power(byte - 127) / 6
    byte = np.where(zero, 0, byte)
    with np.errstate(over="ignore"):
        codes, beyond = cast(z, spread(coefficient, height, 32, z.shape), field)
    codes = np.where(spread(zero, height, 32, z.shape), 0, codes).astype(np.uint8)
    scales = spread(byte, height, 1, (z.shape[0], byte.shape[1])).astype(np.uint8)
    value = e2m1_value(codes) * spread(np.where(zero, 0, delta), height, 32, z.shape)
    return Operand(codes, scales, None, value, beyond)


def encode_factor(amax, reach):
    """Transformer Engine's global encode scale, reach / amax: 1 where amax is 0 or not finite."""
    if amax == 0 or not np.isfinite(amax):
        return F32(1)
    with np.errstate(over="ignore"):
        return np.minimum(F32(reach) / amax, FLT_MAX)


def reciprocal(x):
    with np.errstate(divide="ignore", over="ignore"):
        return np.minimum(F32(1) / x, FLT_MAX)


def saturated_scale(t):
    """E4M3 of min(t, FLT_MAX); a NaN is FLT_MAX then."""
    return e4m3(np.where(np.isnan(t), FLT_MAX, np.minimum(t, FLT_MAX)).astype(F32))


def encode(z, scale, decode, height, field):
    """E2M1 of z * min(1 / (scale * decode), FLT_MAX); 0 where the scale is."""
    e = reciprocal(e4m3_value(scale).astype(F32) * decode)
    with np.errstate(over="ignore", invalid="ignore"):
        codes, beyond = cast(z, spread(e, height, 16, z.shape), field)
    live = spread(scale != 0, height, 16, z.shape)
    return np.where(live, codes, 0).astype(np.uint8), beyond & live


def nvfp4(z, tile, field, four_over_six=False):
    amax, height = np.abs(z).max(), tile if tile else 1
    reach = 1536 if four_over_six else 2688
    s = encode_factor(amax, reach)
    d = F32(1) / s
    a = block_amax(z, height, 16)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = saturated_scale(a / F32(6) * s if four_over_six else a * (s * SIXTH))
        codes, beyond = encode(z, scale, d, height, field)
        if four_over_six:
            scale4 = saturated_scale(a / F32(6) * s * F32(1.5))
            codes4, beyond4 = encode(z, scale4, d, height, field)
            four = decoding_error(z, codes4, scale4, amax, height) < decoding_error(z, codes, scale, amax, height)
            scale = np.where(four, scale4, scale)
            wide = spread(four, height, 16, z.shape)
            codes, beyond = np.where(wide, codes4, codes), np.where(wide, beyond4, beyond)
        scales = spread(scale, height, 1, (z.shape[0], scale.shape[1]))
        value = e2m1_value(codes) * spread(e4m3_value(scale), height, 16, z.shape) * (F64(amax) / reach)
    return Operand(codes, scales, one_nan(amax).reshape(1, 1), value, beyond)


def decoding_error(z, codes, scale, amax, height):
    """FP32 sums of |decoded - z|: 16 columns in order, then a tile's rows 8, 4, 2 and 1 apart."""
    q, sc = e2m1_value(codes).astype(F32), spread(e4m3_value(scale), height, 16, z.shape).astype(F32)
    error = np.abs(q * sc * amax / F32(1536) - z)
    total = np.zeros((z.shape[0], z.shape[1] // 16), F32)
    for i in range(16):
        total = total + error[:, i::16]
    if height == 16:
        total = total.reshape(-1, 16, total.shape[1])
        for half in (8, 4, 2, 1):
            total = total[:, :half] + total[:, half : 2 * half]
        total = total[:, 0]
    return total


def local(z, rule, tile, field, strip, segment):
    """CTA-local NVFP4: each strip and segment by itself, an outer factor each."""
    rows, cols = z.shape
    strip, segment = strip or rows, segment or cols
    codes, scales = np.zeros(z.shape, np.uint8), np.zeros((rows, cols // 16), np.uint8)
    outer, value = np.zeros((-(-rows // strip), -(-cols // segment)), F32), np.zeros(z.shape)
    beyond = np.zeros(z.shape, bool)
    for p in range(outer.shape[0]):
        for q in range(outer.shape[1]):
            r, c = slice(p * strip, (p + 1) * strip), slice(q * segment, (q + 1) * segment)
            s = slice(q * segment // 16, (q + 1) * segment // 16)
            part = local_strip(z[r, c], rule, tile, None if field is None else field[r, c])
            codes[r, c], scales[r, s], outer[p, q], value[r, c] = part.codes, part.scales, part.outer, part.value
            beyond[r, c] = part.beyond
    return Operand(codes, scales, outer, value, beyond)


def local_strip(z, rule, tile, field):
    """Chunks of 128x128 from the corner, then one outer factor.

    rule "faithful": N = 448, FP32 factors; "pow2": N = 2688, powers of two."""
    height = tile if tile else 1
    chunk, m = block_amax(z, 128, 128), block_amax(z, height, 16)
    bad = not np.isfinite(chunk).all()
    chunk, m = (np.where(np.isfinite(a), a, BF16_MAX) for a in (chunk, m))
    zero = chunk == 0
    if zero.all():
        none = np.zeros(z.shape, np.uint8)
        return Operand(none, none[:, ::16], F32(0), none * 0.0, none > 0)

    def of_block(x):  # a chunk's number at each of its blocks
        return spread(x, 128 // height, 8, m.shape)

    safe = np.where(zero, F32(1), chunk)
    if rule == "faithful":
        with np.errstate(over="ignore"):
            factor = np.minimum(F32(448) / safe, FLT_MAX) * SIXTH
        g = chunk / F32(448)
        scale = e4m3(m * of_block(factor))
        e = reciprocal(e4m3_value(scale).astype(F32) * of_block(g))
        unit = np.ones_like(m, F64)
        outer = g.max()
        fold = g / outer
    else:
        f, x = np.frexp(safe.astype(F64))  # f in [1/2, 1): 2688 = 1.3125 * 2^11
        exponent = x - 1 - 11 + (2 * f > 1.3125)
        top = exponent[~zero].max()
        unit = of_block(power(-exponent))
        scale = e4m3((m * unit).astype(F32) * SIXTH)
        e = reciprocal(e4m3_value(scale).astype(F32))
        outer, fold = F32(power(top)), power(np.minimum(exponent - top, 0))
    in_units = (z * spread(unit, height, 16, z.shape)).astype(F32)
    with np.errstate(over="ignore", invalid="ignore"):
        codes, beyond = cast(in_units, spread(e, height, 16, z.shape), field)
    folded = e4m3((e4m3_value(scale) * of_block(fold)).astype(F32))
    live = spread(folded != 0, height, 16, z.shape)
    codes = np.where(live, codes, 0).astype(np.uint8)
    scales = spread(folded, height, 1, (z.shape[0], folded.shape[1]))
    outer = F32(np.nan) if bad else outer
    value = e2m1_value(codes) * spread(e4m3_value(folded), height, 16, z.shape) * F64(outer)
    return Operand(codes, scales, outer, value, beyond & live)


def fp8_scale(z, format, rule):
    """(amax, largest code / amax), of the view ("tensor") or of each row ("row")."""
    amax = np.abs(z).max(1, keepdims=True) if rule == "row" else np.abs(z).max().reshape(1, 1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        s = np.minimum(F32(448 if format == "e4m3" else 57344) / amax, FLT_MAX)
    return amax, np.where((amax == 0) | ~np.isfinite(amax), F32(1), s)


def fp8(z, format, rule):
    table, encode8 = (E4M3, e4m3) if format == "e4m3" else (E5M2, e5m2)
    amax, s = fp8_scale(z, format, rule)
    outer = np.where(np.isfinite(amax), F32(1) / s, one_nan(amax))
    codes = encode8(z * s)
    magnitude = np.append(table, np.full(128 - len(table), np.nan))[codes & 0x7F]
    value = np.where(codes & 0x80, -1.0, 1.0) * magnitude * outer.astype(F64)
    return Operand(codes, None, outer, value, np.abs(z * s) > table[-1])


# ---- layout -------------------------------------------------------------------------


def pack(codes):
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
