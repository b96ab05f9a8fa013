#!/usr/bin/env python3
"""Golden losses and gradients: the model of model/model.h in float64 JAX.

    python3 tests/oracle/llama_jax.py tests/golden/llama_gradients.bin

Needs jax and numpy.  Nothing here comes from the C sources: a literal Llama
with interleaved rotary pairs, and jax.grad.  Parameters and tokens are drawn
by Philox4x32-10, so that tests/model_gradient_test.c can make them too; every
parameter is a number that BF16 holds exactly.

The file, for each case:
    case NAME batch seq_len vocab hidden ffn layers heads kv_heads head_dim tied
         eps theta scaled factor low high original loss ignored           (one line)
    nll of every token                                                   (float32)
    then for each parameter
    param NAME rows cols norm samples                                    (one line)
    gradient at the sampled elements, then PROJECTIONS sums of it with random signs (float32)
Lines are text ended by a newline, numbers in them hexadecimal where they are
not integers; arrays are little-endian.  A tensor of at most SAMPLES elements
is sampled whole, in order; a larger one where `sample_positions` says.
"""
import sys

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

SAMPLES, PROJECTIONS = 256, 16
DRAW_PARAMETER, DRAW_TOKEN, DRAW_POSITION, DRAW_SIGN = 1, 2, 3, 4
M32 = np.uint64(0xFFFFFFFF)

CASES = [
    # name, batch, seq_len, vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied, eps, theta, scaling, ignored
    ("gqa-4-2", 3, 7, 131, 48, 80, 2, 4, 2, 16, False, 1e-5, 1e4, None, False),
    ("gqa-6-2-tied", 2, 33, 258, 40, 56, 2, 6, 2, 8, True, 1e-5, 1e4, None, True),
    ("mqa-8-1-scaled", 1, 33, 131, 64, 96, 2, 8, 1, 16, False, 1e-5, 5e5, (8.0, 1.0, 4.0, 64), False),
    ("mha-dim64-tied-eps", 1, 33, 258, 96, 64, 1, 2, 2, 64, True, 0.25, 1e4, None, False),
    ("gqa-4-1-dim64-tied-scaled", 3, 7, 131, 72, 40, 3, 4, 1, 64, True, 1e-5, 5e5, (32.0, 1.0, 4.0, 64), True),
    ("two-tiles", 1, 150, 131, 32, 48, 1, 8, 4, 8, False, 1e-5, 1e4, None, True),
    ("one-token", 3, 1, 17, 34, 33, 2, 3, 1, 10, False, 1e-5, 1e4, None, False),
]


def philox(key, c0, c1, c2):
    """Words [4, n] at counters (c0[i], c1, c2, 0)."""
    c = [np.asarray(c0, np.uint64)] + [np.full(len(c0), x, np.uint64) for x in (c1, c2, 0)]
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & M32, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & M32]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & M32, (k1 + np.uint64(0xBB67AE85)) & M32
    return np.stack(c)


def words(key, n, c1, c2):
    """Element i takes word i % 4 of block i / 4."""
    return philox(key, np.arange((n + 3) // 4), c1, c2).T.reshape(-1)[:n].astype(np.int64)


def parameter(key, number, rows, cols):
    """Matrices: u / 128 / 2^s, u in [-127, 127], 4^s >= cols; gains: 1 + (u >> 2) / 128."""
    u = np.maximum((words(key, rows * cols, number, DRAW_PARAMETER) >> 24) - 128, -127)
    if cols == 1:
        return (1.0 + (u >> 2) / 128.0).reshape(rows)
    s = 0
    while 4**s < cols:
        s += 1
    return (u / 128.0 / 2.0**s).reshape(rows, cols)


def tokens(key, n, vocab, ignored):
    """Half of the inputs are among the first five tokens, so that some repeat."""
    w = philox(key, np.arange(n), 0, DRAW_TOKEN).astype(np.int64)
    inputs = np.where(w[3] % 2 == 0, w[0] % vocab, w[0] % 5)
    targets = np.where(ignored & (w[2] % 4 == 0), -1, w[1] % vocab)
    return inputs, targets


def sample_positions(key, number, n):
    if n <= SAMPLES:
        return np.arange(n)
    return words(key, SAMPLES, number, DRAW_POSITION) % n


def signs(key, number, n):
    """[PROJECTIONS, n] of +-1: bit p of the word of an element."""
    w = words(key, n, number, DRAW_SIGN)
    return np.stack([1.0 - 2.0 * ((w >> p) & 1) for p in range(PROJECTIONS)])


def parameter_shapes(vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied):
    shapes = [("tok_embeddings.weight", vocab, hidden)]
    for i in range(layers):
        at = "layers.%d." % i
        shapes += [
            (at + "attention_norm.weight", hidden, 1),
            (at + "attention.wq.weight", heads * head_dim, hidden),
            (at + "attention.wk.weight", kv_heads * head_dim, hidden),
            (at + "attention.wv.weight", kv_heads * head_dim, hidden),
            (at + "attention.wo.weight", hidden, heads * head_dim),
            (at + "ffn_norm.weight", hidden, 1),
            (at + "feed_forward.w1.weight", ffn, hidden),
            (at + "feed_forward.w3.weight", ffn, hidden),
            (at + "feed_forward.w2.weight", hidden, ffn),
        ]
    shapes.append(("norm.weight", hidden, 1))
    if not tied:
        shapes.append(("output.weight", vocab, hidden))
    return shapes


def frequencies(head_dim, theta, scaling):
    f = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return f
    factor, low, high, original = scaling
    out = []
    for x in f:
        wavelength = 2 * np.pi / x
        if wavelength < original / high:
            out.append(x)
        elif wavelength > original / low:
            out.append(x / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * x / factor + smooth * x)
    return np.array(out)


def rms_norm(x, gain, eps):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def rotate(x, angle):
    """x [batch, seq, heads, dim]; pair i is elements 2i and 2i + 1."""
    even, odd = x[..., 0::2], x[..., 1::2]
    c, s = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    return jnp.stack([even * c - odd * s, even * s + odd * c], axis=-1).reshape(x.shape)


def nll(p, inputs, targets, batch, seq, layers, heads, kv_heads, head_dim, tied, eps, theta, scaling):
    angle = jnp.arange(seq)[:, None] * frequencies(head_dim, theta, scaling)[None, :]
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    x = p["tok_embeddings.weight"][inputs.reshape(batch, seq)]
    for i in range(layers):
        w = lambda name: p["layers.%d.%s.weight" % (i, name)]
        h = rms_norm(x, w("attention_norm"), eps)
        q = rotate((h @ w("attention.wq").T).reshape(batch, seq, heads, head_dim), angle)
        k = rotate((h @ w("attention.wk").T).reshape(batch, seq, kv_heads, head_dim), angle)
        v = (h @ w("attention.wv").T).reshape(batch, seq, kv_heads, head_dim)
        k, v = (jnp.repeat(t, heads // kv_heads, axis=2) for t in (k, v))
        score = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(head_dim)
        weight = jax.nn.softmax(jnp.where(causal, score, -jnp.inf), axis=-1)
        x = x + jnp.einsum("bhij,bjhd->bihd", weight, v).reshape(batch, seq, heads * head_dim) @ w("attention.wo").T
        h = rms_norm(x, w("ffn_norm"), eps)
        gate, up = h @ w("feed_forward.w1").T, h @ w("feed_forward.w3").T
        x = x + (gate * jax.nn.sigmoid(gate) * up) @ w("feed_forward.w2").T
    logits = rms_norm(x, p["norm.weight"], eps) @ p["tok_embeddings.weight" if tied else "output.weight"].T
    logits = logits.reshape(batch * seq, -1)
    each = jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(batch * seq), jnp.maximum(targets, 0)]
    return jnp.where(targets >= 0, each, 0.0)


def number(x):
    return x.hex() if isinstance(x, float) else str(int(x))


def write_case(out, key, case):
    name, batch, seq, vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied, eps, theta, scaling, ignored = case
    shapes = parameter_shapes(vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied)
    p = {shape[0]: jnp.array(parameter(key, i, shape[1], shape[2])) for i, shape in enumerate(shapes)}
    inputs, targets = tokens(key, batch * seq, vocab, ignored)
    valid = int((targets >= 0).sum())
    model = (inputs, targets, batch, seq, layers, heads, kv_heads, head_dim, tied, eps, theta, scaling)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: nll(p, *model).sum() / valid))(p)
    factor, low, high, original = scaling or (1.0, 1.0, 2.0, 1)
    fields = [batch, seq, vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied, eps, theta,
              scaling is not None, factor, low, high, original, float(loss), ignored]
    out.write(("case %s %s\n" % (name, " ".join(map(number, fields)))).encode())
    out.write(np.asarray(nll(p, *model)).astype("<f4").tobytes())
    for i, (label, rows, cols) in enumerate(shapes):
        g = np.asarray(gradient[label]).reshape(-1)
        at = sample_positions(key, i, len(g))
        out.write(("param %s %d %d %s %d\n" % (label, rows, cols, number(float(np.linalg.norm(g))), len(at))).encode())
        out.write(g[at].astype("<f4").tobytes() + (signs(key, i, len(g)) @ g).astype("<f4").tobytes())
    print("%-28s loss %.6f, %d parameters, %d of %d targets" % (
        name, loss, sum(x.size for x in p.values()), valid, batch * seq))


def main():
    with open(sys.argv[1], "wb") as out:
        for i, case in enumerate(CASES):
            write_case(out, 1000 + i, case)


if __name__ == "__main__":
    main()
