#!/usr/bin/env python3
"""Golden losses and gradients of small Llamas, by JAX in float64.

    python tests/oracle/model.py tests/golden/model.bin

Needs jax and numpy.  The model is written from its formulas (complex rotary
pairs, softmax over a full masked square), sharing nothing with the C code but
the order of parameters.  tests/model_oracle_test.c reads the file: for each
case its shape, tokens, targets, nll (float64) and gradients (float32, in the
order of the flat buffers) of sum(nll) / counted targets.

Parameters are a function of their flat index (`value`), exact in BF16.
"""
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

# vocab hidden ffn layers heads kv head_dim tied batch seq eps theta scaling(factor low high original) ignored
CASES = [
    (29, 24, 40, 2, 4, 2, 6, 0, 3, 7, 1e-5, 1e4, None, ()),
    (31, 20, 36, 2, 3, 3, 8, 1, 1, 13, 1e-6, 5e5, None, ()),
    (17, 12, 20, 1, 5, 1, 4, 0, 2, 1, 1e-5, 1e4, None, ()),
    (23, 20, 28, 2, 2, 2, 16, 0, 1, 40, 1e-5, 500.0, (8.0, 1.0, 4.0, 16), ()),
    (37, 20, 28, 3, 6, 2, 6, 1, 2, 33, 1e-5, 1e4, None, (0, 5, 40, 65)),
    (2, 16, 8, 2, 1, 1, 2, 0, 4, 5, 1e-5, 1e4, None, (3,)),
]


def mix(x):
    """A 32-bit integer hash (Murmur3's finaliser)."""
    x = np.asarray(x, dtype=np.uint64) & 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def parameters(case):
    vocab, hidden, ffn, layers, heads, kv, dim, tied = case[:8]
    names = [("tok_embeddings", vocab, hidden)]
    for layer in range(layers):
        names += [(f"{layer}.{n}", r, c) for n, r, c in (
            ("attention_norm", hidden, 1), ("wq", heads * dim, hidden), ("wk", kv * dim, hidden),
            ("wv", kv * dim, hidden), ("wo", hidden, heads * dim), ("ffn_norm", hidden, 1),
            ("w1", ffn, hidden), ("w3", ffn, hidden), ("w2", hidden, ffn))]
    names.append(("norm", hidden, 1))
    if not tied:
        names.append(("output", vocab, hidden))
    return names


def values(case):
    out, offset = {}, 0
    for name, rows, cols in parameters(case):
        k = (mix(np.arange(offset, offset + rows * cols)) >> 24).astype(np.int64) - 128
        w = 1 + (k >> 2) / 128 if cols == 1 else k / 512.0
        out[name] = jnp.asarray(w.reshape(rows, cols) if cols > 1 else w)
        offset += rows * cols
    return out


def rotation(case):
    dim, seq, theta, scaling = case[6], case[9], case[11], case[12]
    f = theta ** (-np.arange(0, dim, 2) / dim)
    if scaling:
        factor, low, high, original = scaling
        wavelength = 2 * np.pi / f
        smooth = (original / wavelength - low) / (high - low)
        f = np.where(wavelength < original / high, f,
                     np.where(wavelength > original / low, f / factor, (1 - smooth) * f / factor + smooth * f))
    return jnp.exp(1j * np.outer(np.arange(seq), f))


def nll_of(p, case, tokens, targets):
    vocab, hidden, ffn, layers, heads, kv, dim, tied, batch, seq, eps = case[:11]
    rotate = rotation(case)[None, :, None, :]

    def norm(x, gain):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain

    def rope(x):
        z = x.reshape(batch, seq, -1, dim // 2, 2)
        z = (z[..., 0] + 1j * z[..., 1]) * rotate
        return jnp.stack((z.real, z.imag), -1).reshape(batch, seq, -1, dim)

    x = p["tok_embeddings"][tokens]
    for i in range(layers):
        h = norm(x, p[f"{i}.attention_norm"])
        q, k, v = (h @ p[f"{i}.{n}"].T for n in ("wq", "wk", "wv"))
        q, k = rope(q.reshape(batch, seq, heads, dim)), rope(k.reshape(batch, seq, kv, dim))
        k, v = (jnp.repeat(t.reshape(batch, seq, kv, dim), heads // kv, 2) for t in (k, v))
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(dim)
        s = jnp.where(np.tril(np.ones((seq, seq), bool)), s, -jnp.inf)
        a = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v).reshape(batch, seq, heads * dim)
        x = x + a @ p[f"{i}.wo"].T
        h = norm(x, p[f"{i}.ffn_norm"])
        x = x + (jax.nn.silu(h @ p[f"{i}.w1"].T) * (h @ p[f"{i}.w3"].T)) @ p[f"{i}.w2"].T
    logits = norm(x, p["norm"]) @ p["tok_embeddings" if tied else "output"].T
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets < 0, 0.0, jax.nn.logsumexp(logits, -1) - picked)


def main():
    with open(sys.argv[1], "wb") as f:
        f.write(struct.pack("<q", len(CASES)))
        for number, case in enumerate(CASES):
            vocab, batch, seq, scaling = case[0], case[8], case[9], case[12] or (0.0, 0.0, 0.0, 0)
            n = batch * seq
            tokens = (mix(np.arange(n) + 1000 * (number + 1)) % vocab).astype(np.int32)
            targets = (mix(np.arange(n) + 5000 * (number + 1)) % vocab).astype(np.int32)
            targets[list(case[13])] = -1
            p, square = values(case), (batch, seq)
            counted = int((targets >= 0).sum())
            nll = nll_of(p, case, tokens.reshape(square), targets.reshape(square))
            g = jax.grad(lambda w: nll_of(w, case, tokens.reshape(square), targets.reshape(square)).sum() / counted)(p)
            f.write(struct.pack("<11q", *case[:10], scaling[3]))
            f.write(struct.pack("<5d", *case[10:12], *scaling[:3]))
            f.write(tokens.astype("<i4").tobytes() + targets.astype("<i4").tobytes())
            f.write(np.asarray(nll, "<f8").tobytes())
            for name, _, _ in parameters(case):
                f.write(np.asarray(g[name], "<f4").tobytes())


main()
