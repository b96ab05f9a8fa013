"""Golden attention for tests/cpu_attention_lowp_test.c.

    python tests/oracle/attention_lowp.py tests/golden/attention.bin

Low-precision cases are a NumPy model in float64 of what kernels/attention.h and
kernels/cpu/attention.h say: whole rows of scores, P tile by tile, codes found in
tables of values (quantiser_model).  Cases of plain formats are JAX's: softmax
attention written directly, gradients by jax.vjp, all in float64.

The file, for each case:
    case NAME batch seq_len heads kv_heads head_dim qk pv d_out slope offset lift steep gradient documents
    codes Q4 Q4-SCALES K4 K4-SCALES V4 V4-SCALES Q8 K8 V8 DO LIFT
    counts elements underflowed …                       Q K V P dO dS
    float32: out [T, H], lse [batch, H, S], dQ [T, H], dK [T, KV], dV [T, KV]
Formats are kernels/encoding.h's numbers; codes the low 64 bits of XXH3-128 over
the bytes, or -.  Of out and gradients stands, for each token and head, the sum
over d of value times sign, the sign being bit 0 of a draw: rounded to BF16
before, in the low-precision cases.  Inputs are made by Philox in both languages.
documents: in a thousand tokens, how many begin one, within which attention stays
(0: the sample is one).
"""
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import xxhash
from quantiser_inputs import SCALE, halves, word
from quantiser_model import E2M1, E4M3, E5M2 as E5M2_VALUES, F32, F64, e2m1, e2m1_value, e4m3, e5m2

jax.config.update("jax_enable_x64", True)

BF16, FP8, E5M2, MXFP4, NVFP4 = 2, 3, 4, 5, 6
TILE = 128

CASES = [
    # name, batch, seq_len, heads, kv_heads, head_dim, qk, pv, d_out, slope, offset, lift, steep, gradient, documents
    ("training", 2, 150, 4, 1, 64, NVFP4, FP8, E5M2, 0, 0, 0, 0, 1, 0),
    ("training-128", 1, 131, 8, 1, 128, NVFP4, FP8, E5M2, 0, 0, 0, 0, 1e-6, 0),
    ("steep", 1, 290, 2, 1, 32, NVFP4, FP8, E5M2, 0, 0, 0, 0.03, 1, 0),
    ("one-token", 3, 1, 2, 1, 16, NVFP4, FP8, E5M2, 0, 0, 0, 0, 1, 0),
    ("control", 2, 161, 4, 4, 32, NVFP4, MXFP4, E5M2, 0, 0, 0, 0, 1, 0),
    ("control-affine", 1, 97, 4, 2, 64, NVFP4, MXFP4, E5M2, 1.5, 1.2, 0, 0, 1, 0),
    ("control-steep", 1, 290, 2, 1, 32, NVFP4, MXFP4, E5M2, 0, 0, 0, 0.03, 1, 0),
    ("control-plain-gradient", 2, 33, 2, 2, 128, BF16, MXFP4, BF16, 0, 0, 0, 0, 1, 0),
    ("e4m3-scores", 1, 130, 4, 1, 64, FP8, FP8, BF16, 0, 0, 0, 0, 1, 0),
    ("e4m3-throughout", 1, 95, 4, 1, 64, FP8, FP8, FP8, 0, 0, 0, 0, 1e-3, 0),
    ("nvfp4-scores", 2, 37, 4, 2, 48, NVFP4, BF16, BF16, 0, 0, 0, 0, 1, 0),
    ("quantised-gradient", 1, 129, 2, 1, 64, BF16, BF16, E5M2, 0, 0, 0, 0, 1, 0),
    ("given-lift", 1, 64, 2, 1, 64, NVFP4, FP8, FP8, 0, 0, 1, 0, 1e-3, 0),
    ("plain-1-64", 1, 129, 2, 2, 64, BF16, BF16, BF16, 0, 0, 0, 0, 1, 0),
    ("plain-4-64", 2, 67, 4, 1, 64, BF16, BF16, BF16, 0, 0, 0, 0, 1, 0),
    ("plain-8-128", 1, 131, 8, 1, 128, BF16, BF16, BF16, 0, 0, 0, 0, 1, 0),
    ("plain-1-128", 1, 33, 1, 1, 128, BF16, BF16, BF16, 0, 0, 0, 0, 1, 0),
    ("documents", 2, 167, 4, 2, 32, BF16, BF16, BF16, 0, 0, 0, 0, 1, 60),
    ("documents-long", 1, 410, 2, 1, 16, BF16, BF16, BF16, 0, 0, 0, 0, 1, 8),
    ("documents-of-one", 1, 45, 2, 1, 16, BF16, BF16, BF16, 0, 0, 0, 0, 1, 1000),
    ("documents-training", 2, 291, 2, 1, 32, NVFP4, FP8, E5M2, 0, 0, 0, 0, 1, 30),
    ("documents-control", 1, 193, 4, 2, 32, NVFP4, MXFP4, E5M2, 0, 0, 0, 0, 1, 40),
    ("documents-affine", 1, 150, 2, 2, 16, NVFP4, MXFP4, E5M2, 1.5, 1.2, 0, 0, 1, 100),
    ("documents-e4m3", 1, 130, 4, 1, 32, FP8, FP8, FP8, 0, 0, 0, 0, 1e-3, 300),
]


def bf16(x):
    return np.asarray(x).astype(F32).astype(ml_dtypes.bfloat16).astype(F64)


def fp8_value(code, table):
    return np.where(code & 0x80, -1.0, 1.0) * table[code & 0x7F]


class Case:
    def __init__(self, fields):
        (self.name, self.B, self.S, self.H, self.KV, self.D, self.qk, self.pv, self.d_out, self.slope, self.offset,
         self.lift, self.steep, self.gradient, self.documents) = fields
        self.fields = fields
        self.T, self.group = self.B * self.S, self.H // self.KV
        q, k = self.H * self.D, self.KV * self.D
        cols = q + 2 * k
        x = halves(np.arange(self.T * cols), 21).reshape(self.T, cols) * SCALE
        position = np.arange(self.T) % self.S
        x[:, q : q + k] *= (1 + self.steep * position)[:, None]
        x = bf16(x)
        self.q, self.k, self.v = x[:, :q], x[:, q : q + k], x[:, q + k :]
        self.g = bf16(halves(np.arange(self.T * q), 22).reshape(self.T, q) * SCALE * self.gradient)
        self.coded = self.d_out in (FP8, E5M2)
        self.codes = ["-"] * 11
        self.counts = np.zeros((6, 2), int)
        begins = (word(np.arange(self.T), 31)[0] % 1000 < self.documents).reshape(self.B, self.S)
        i = np.arange(self.S)
        start = np.maximum.accumulate(np.where(begins, i, 0), axis=1)
        self.visible = (i[None, None] <= i[:, None]) & (i[None, None] >= start[:, :, None])
        self.visible = np.broadcast_to(self.visible[:, None], (self.B, self.H, self.S, self.S))

    def heads(self, x, n):
        return x.reshape(self.B, self.S, n, self.D).transpose(0, 2, 1, 3)

    def rows(self, x):
        return x.transpose(0, 2, 1, 3).reshape(self.T, -1)


def digest(a):
    return f"{xxhash.xxh3_128_intdigest(np.ascontiguousarray(a).tobytes()) & 0xFFFFFFFFFFFFFFFF:016x}"


def tiled(scales):
    """Bytes [rows, columns] in tiles of 128 x 4."""
    rows, columns = scales.shape
    groups = -(-columns // 4)
    out = np.zeros(-(-rows // 128) * groups * 512, np.uint8)
    for r in range(rows):
        for c in range(columns):
            out[(r // 128 * groups + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    return out


def packed(codes):
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


# ---- codes of boundary (2) -----------------------------------------------------


def k16(c, x, view, tensor):
    blocks = x.astype(F32).reshape(c.T, -1, 16)
    scale = e4m3(np.abs(blocks).max(-1) / F32(6))
    value = fp8_value(scale, E4M3)[..., None]
    with np.errstate(divide="ignore"):
        factor = np.where(value > 0, F32(1) / value.astype(F32), F32(0)).astype(F32)
    codes = e2m1(blocks * factor)
    c.codes[view], c.codes[view + 1] = digest(packed(codes.reshape(c.T, -1))), digest(tiled(scale))
    count(c, tensor, blocks, codes & 7)
    return (e2m1_value(codes) * value).reshape(c.T, -1)


def fp8(c, x, view, tensor):
    codes = e4m3((4 * x).astype(F32))
    c.codes[view] = digest(codes)
    count(c, tensor, x, codes & 0x7F)
    return fp8_value(codes, E4M3)


def mx_tokens(c, x):
    """V by blocks of 32 tokens of each feature; values."""
    S32, features = -(-c.S // 32) * 32, x.shape[1]
    whole = np.zeros((c.B, S32, features))
    whole[:, : c.S] = x.reshape(c.B, c.S, features)
    blocks = whole.transpose(0, 2, 1).reshape(c.B, features, -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    n, f = np.frexp(amax)  # amax = n 2^f, n in [1/2, 1)
    e = np.where(amax > 0, f - 1 + (2 * n >= 1.203125), -127)
    codes = np.where(amax > 0, e2m1(6 * blocks / 2.0**e), 0).astype(np.uint8)
    byte = np.where(amax > 0, e + 127, 0).astype(np.uint8)[..., 0]
    c.codes[4] = digest(packed(codes.reshape(c.B, features, S32)))
    c.codes[5] = digest(np.concatenate([tiled(b) for b in byte]))
    count(c, 2, whole[:, : c.S].transpose(0, 2, 1), codes.reshape(c.B, features, S32)[..., : c.S] & 7)
    value = e2m1_value(codes) * 2.0**e / 6
    return value.reshape(c.B, features, S32)[..., : c.S].transpose(0, 2, 1).reshape(c.T, features)


def count(c, tensor, x, code):
    c.counts[tensor] += [code.size, int(((code == 0) & (x != 0)).sum())]


# ---- forward -------------------------------------------------------------------


def p_codes(c, s, kappa, base, visible):
    """P of a tile of scores, what of it is summed, and its zeros; base: of each row."""
    t = np.where(visible, s * kappa - base, -np.inf)
    p = 2.0**t
    if c.pv == FP8:
        value = fp8_value(e4m3(p), E4M3)
        return value, p, visible & (value == 0)
    if c.pv == BF16:
        return p, p, visible & False
    value = np.zeros_like(p)
    for first in range(0, p.shape[-1], 32):
        x = t[..., first : first + 32]
        top = x.max(-1, keepdims=True)
        raised = top + (0 if c.slope else 1 - np.log2(1.25))
        e = np.floor(np.where(np.isfinite(raised), raised, 0))
        u = x - e + np.log2(6)
        u = np.maximum(0, c.slope * u + c.offset) if c.slope else 2.0**u
        code = np.where(np.isfinite(x) & (e >= -126), E2M1[e2m1(u) & 7], 0)
        value[..., first : first + 32] = code * 2.0**e / 6
    return value, value, visible & (value == 0)


def forward(c, q, k, v):
    kappa = np.log2(np.e) / np.sqrt(c.D)
    s = q @ k.transpose(0, 1, 3, 2)
    m = np.full((c.B, c.H, c.S, 1), -np.inf)
    l, o = np.zeros((c.B, c.H, c.S, 1)), np.zeros((c.B, c.H, c.S, c.D))
    zeros = 0
    for first in range(0, c.S, TILE):
        tile = slice(first, min(first + TILE, c.S))
        visible = c.visible[..., tile]
        top = np.where(visible, s[..., tile], -np.inf).max(-1, keepdims=True)
        top = np.maximum(top, m)
        with np.errstate(invalid="ignore"):
            stays = np.isfinite(m) & ((m - top) * kappa >= -8) & (c.pv != BF16)
            new = np.where(stays, m, top)
            c_ = np.where(np.isfinite(m), 2.0 ** ((m - new) * kappa), 0)
        live = np.isfinite(new)
        p, summed, zero = p_codes(c, s[..., tile], kappa, np.where(live, new, 0) * kappa, visible)
        l = l * c_ + summed.sum(-1, keepdims=True)
        o = o * c_ + p @ v[..., tile, :]
        m = new
        zeros += int(zero.sum())
    if c.pv != BF16:
        c.counts[3] = [int(c.visible.sum()), zeros]
    return bf16(o / l), (m * kappa * np.log(2) + np.log(l))[..., 0], s


# ---- backward ------------------------------------------------------------------


def backward(c, s, out, lse, operands):
    """operands: those of scores and dP, then those of dQ and dK."""
    q, k, v, q8, k8, v8 = operands
    sigma = 1 / np.sqrt(c.D)
    kappa = np.log2(np.e) * sigma
    g = c.heads(c.g, c.H)
    visible = c.visible
    if not c.coded:
        p = np.where(visible, np.exp(s * sigma - lse[..., None]), 0)
        ds = p * (g @ v.transpose(0, 1, 3, 2) - (g * out).sum(-1, keepdims=True)) * sigma
        return ds @ k, per_kv(c, ds.transpose(0, 1, 3, 2) @ q), per_kv(c, p.transpose(0, 1, 3, 2) @ g)

    amax = np.abs(g).reshape(c.B, c.KV, -1).max(-1)
    lift = np.full(amax.shape, float(c.lift)) if c.lift else np.where(amax > 0, 2.0 ** (2 - np.floor(np.log2(amax))), 1)
    each = np.repeat(lift, c.group, axis=1)[:, :, None, None]
    encode, table = (e5m2, E5M2_VALUES) if c.d_out == E5M2 else (e4m3, E4M3)
    codes = encode((4 * each * g).astype(F32))
    c.codes[9], c.codes[10] = digest(c.rows(codes)), digest(lift.astype(F32))
    count(c, 4, g, codes & 0x7F)
    g = fp8_value(codes, table)
    d_stat = -4 * (g * out).sum(-1, keepdims=True)
    l_stat = 8 - lse[..., None] * np.log2(np.e)
    p = np.where(visible, 2.0 ** np.minimum(s * kappa + l_stat, 8), 0)
    p = fp8_value(e4m3(p), E4M3)
    difference = g @ v8.transpose(0, 1, 3, 2) + d_stat
    ds = fp8_value(e4m3(p * difference * sigma / 16), E4M3)
    c.counts[5] = [int(visible.sum()), int((visible & (ds == 0) & (difference != 0)).sum())]
    unlift = 2.0**-10 / lift[:, :, None, None]
    d_k = per_kv(c, ds.transpose(0, 1, 3, 2) @ q8) * unlift
    d_v = per_kv(c, p.transpose(0, 1, 3, 2) @ g) * unlift
    return (ds @ k8) * (2.0**-10 / each), d_k, d_v


def per_kv(c, x):
    return x.reshape(c.B, c.KV, c.group, c.S, c.D).sum(2)


# ---- cases ---------------------------------------------------------------------


def lowp(c):
    q, k, v = c.q, c.k, c.v
    q8 = k8 = v8 = None
    if c.qk == NVFP4:
        q, k = k16(c, q, 0, 0), k16(c, k, 2, 1)
    if c.qk == FP8 or c.coded:
        q8, k8 = fp8(c, c.q, 6, 0), fp8(c, c.k, 7, 1)
        if c.qk == FP8:
            q, k = q8 / 4, k8 / 4
    if c.pv == MXFP4:
        v = mx_tokens(c, v)
    if c.pv == FP8 or c.coded:
        v8 = fp8(c, c.v, 8, 2)
        v = v8 / 4 if c.pv == FP8 else v
    operands = [None if x is None else c.heads(x, n) for x, n in zip((q, k, v, q8, k8, v8), (c.H, c.KV, c.KV) * 2)]
    operands = [x if x is None or n % 3 == 0 else np.repeat(x, c.group, axis=1) for n, x in enumerate(operands)]
    out, lse, s = forward(c, *operands[:3])
    dq, dk, dv = backward(c, s, out, lse, operands)
    return out, lse, bf16(dq), bf16(dk), bf16(dv)


def exact(c):
    def attention(q, k, v):
        k, v = (jnp.repeat(x, c.group, axis=1) for x in (k, v))
        s = jnp.einsum("bhid,bhjd->bhij", q, k) / jnp.sqrt(float(c.D))
        s = jnp.where(c.visible, s, -jnp.inf)
        return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(s), v), jax.nn.logsumexp(s, axis=-1)

    q, k, v = c.heads(c.q, c.H), c.heads(c.k, c.KV), c.heads(c.v, c.KV)
    (out, lse), pull = jax.vjp(attention, q, k, v)
    return (out, lse, *pull((c.heads(c.g, c.H), jnp.zeros_like(lse))))


def main(path):
    with open(path, "wb") as f:
        for fields in CASES:
            c = Case(fields)
            plain = (c.qk, c.pv, c.d_out) == (BF16, BF16, BF16)
            out, lse, dq, dk, dv = (np.asarray(x) for x in (exact(c) if plain else lowp(c)))
            sign = 1 - 2.0 * (word(np.arange(c.D), 99)[0] & 1)
            f.write(("case " + " ".join(str(x) for x in fields) + "\n").encode())
            f.write(("codes " + " ".join(c.codes) + "\n").encode())
            f.write(("counts " + " ".join(str(n) for n in c.counts.ravel()) + "\n").encode())
            f.write(((out @ sign).transpose(0, 2, 1)).astype("<f4").tobytes())
            f.write(lse.astype("<f4").tobytes())
            for x in (dq, dk, dv):
                f.write(((x @ sign).transpose(0, 2, 1)).astype("<f4").tobytes())


if __name__ == "__main__":
    main(sys.argv[1])
