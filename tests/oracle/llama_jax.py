#!/usr/bin/env python3
"""Golden losses and gradients: the model of model/model.h in float64 JAX.

    python3 tests/oracle/llama_jax.py tests/golden/llama_gradients.bin

Needs jax and numpy.  llama_model.py is the model; here it is written out, and
once more with every BF16 rounding of route `bf16` in its place: how far that
takes a tensor's gradient from the exact one is what its rounding points cost,
whoever computes them.

The file, for each case:
    case NAME batch seq_len vocab hidden ffn layers heads kv_heads head_dim tied
         eps theta scaled factor low high original loss ignored           (one line)
    nll of every token                                                   (float32)
    then for each parameter
    param NAME rows cols rounded                                         (one line)
    its whole gradient                                                   (float32)
`rounded` is the relative error (Frobenius) of the rounded model's gradient.
Lines are text ended by a newline, numbers in them hexadecimal where they are
not integers, `rounded` decimal; arrays are little-endian.
"""
import sys

import jax
import jax.numpy as jnp
import numpy as np

import llama_model as model

CASES = [
    # name, batch, seq_len, vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied, eps, theta, scaling, ignored
    ("gqa-4-2", 3, 7, 131, 48, 80, 2, 4, 2, 16, False, 1e-5, 1e4, None, False),
    ("gqa-6-2-tied", 2, 33, 258, 40, 56, 2, 6, 2, 8, True, 1e-5, 1e4, None, True),
    ("mqa-8-1-scaled", 1, 33, 131, 48, 56, 2, 8, 1, 16, False, 1e-5, 5e5, (8.0, 1.0, 4.0, 64), False),
    ("mha-dim64-tied-eps", 1, 33, 258, 40, 64, 1, 2, 2, 64, True, 0.25, 1e4, None, False),
    ("gqa-4-1-dim64-tied-scaled", 3, 7, 131, 24, 40, 3, 4, 1, 64, True, 1e-5, 5e5, (32.0, 1.0, 4.0, 64), True),
    ("two-tiles", 1, 150, 131, 32, 48, 1, 8, 4, 8, False, 1e-5, 1e4, None, True),
    ("one-token", 3, 1, 17, 34, 33, 2, 3, 1, 10, False, 1e-5, 1e4, None, False),
]



# ---- the rounding points of route `bf16` ---------------------------------------


def bf16(x):
    return x.astype(jnp.float32).astype(jnp.bfloat16).astype(jnp.float64)


@jax.custom_vjp
def value(x):
    """Stored in BF16; its gradient is not."""
    return bf16(x)


value.defvjp(lambda x: (bf16(x), None), lambda _, g: (g,))


@jax.custom_vjp
def gradient(x):
    """Its gradient is stored in BF16."""
    return x


gradient.defvjp(lambda x: (x, None), lambda _, g: (bf16(g),))


def attend(q, k, v):
    causal = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    score = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    weight = jax.nn.softmax(jnp.where(causal, score, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weight, v), weight


@jax.custom_vjp
def attention(q, k, v):
    """Its backward has the output as it was stored, D = sum(dO O), not as it was summed."""
    return bf16(attend(q, k, v)[0])


def attention_forward(q, k, v):
    out, weight = attend(q, k, v)
    return bf16(out), (q, k, v, weight, bf16(out))


def attention_backward(saved, d_out):
    q, k, v, weight, out = saved
    d_weight = jnp.einsum("bihd,bjhd->bhij", d_out, v)
    d_score = weight * (d_weight - jnp.einsum("bihd,bihd->bhi", d_out, out)[..., None]) / np.sqrt(q.shape[-1])
    return (jnp.einsum("bhij,bjhd->bihd", d_score, k), jnp.einsum("bhij,bihd->bjhd", d_score, q),
            jnp.einsum("bhij,bihd->bjhd", weight, d_out))


attention.defvjp(attention_forward, attention_backward)


def rounded_nll(p, inputs, targets, batch, seq, layers, heads, kv_heads, head_dim, tied, eps, theta, scaling):
    """model.nll with these roundings: norms, linears, rotary embedding, SwiGLU and attention store
    BF16, so does the residual stream, and every gradient between two operations; sums are exact."""
    angle = jnp.arange(seq)[:, None] * model.frequencies(head_dim, theta, scaling)[None, :]

    def linear(x, w):
        return gradient(value(x @ w.T))

    def norm(x, gain):
        return gradient(value(model.rms_norm(x, gain, eps)))

    x = p["tok_embeddings.weight"][inputs.reshape(batch, seq)]
    for i in range(layers):
        w = lambda name: p["layers.%d.%s.weight" % (i, name)]
        x = gradient(x)
        h = norm(x, w("attention_norm"))
        q, k, v = (linear(h, w("attention." + n)).reshape(batch, seq, -1, head_dim) for n in ("wq", "wk", "wv"))
        q, k = (gradient(value(model.rotate(t, angle))) for t in (q, k))
        k, v = (jnp.repeat(t, heads // kv_heads, axis=2) for t in (k, gradient(v)))
        out = gradient(attention(q, k, v)).reshape(batch, seq, heads * head_dim)
        x = gradient(value(x + value(out @ w("attention.wo").T)))
        h = norm(x, w("ffn_norm"))
        gate, up = linear(h, w("feed_forward.w1")), linear(h, w("feed_forward.w3"))
        act = gradient(value(gate * jax.nn.sigmoid(gate) * up))
        x = value(x + value(act @ w("feed_forward.w2").T))
    h = norm(gradient(x), p["norm.weight"])
    logits = gradient(h @ p["tok_embeddings.weight" if tied else "output.weight"].T).reshape(batch * seq, -1)
    each = jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(batch * seq), jnp.maximum(targets, 0)]
    return jnp.where(targets >= 0, each, 0.0)


# ---- the file -------------------------------------------------------------------


def number(x):
    return x.hex() if isinstance(x, float) else str(int(x))


def write_case(out, key, case):
    name, batch, seq, vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied, eps, theta, scaling, ignored = case
    shapes = model.parameter_shapes(vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied)
    p = {shape[0]: jnp.array(model.parameter(key, i, shape[1], shape[2])) for i, shape in enumerate(shapes)}
    inputs, targets = model.tokens(key, batch * seq, vocab, ignored)
    valid = int((targets >= 0).sum())
    rest = (inputs, targets, batch, seq, layers, heads, kv_heads, head_dim, tied, eps, theta, scaling)
    loss, exact = jax.jit(jax.value_and_grad(lambda p: model.nll(p, *rest).sum() / valid))(p)
    rounded = jax.jit(jax.grad(lambda p: rounded_nll(p, *rest).sum() / valid))(p)
    factor, low, high, original = scaling or (1.0, 1.0, 2.0, 1)
    fields = [batch, seq, vocab, hidden, ffn, layers, heads, kv_heads, head_dim, tied, eps, theta,
              scaling is not None, factor, low, high, original, float(loss), ignored]
    out.write(("case %s %s\n" % (name, " ".join(map(number, fields)))).encode())
    out.write(np.asarray(model.nll(p, *rest)).astype("<f4").tobytes())
    worst = (0.0, "")
    for label, rows, cols in shapes:
        norm = float(jnp.linalg.norm(exact[label]))
        error = float(jnp.linalg.norm(rounded[label] - exact[label])) / (norm if norm > 1e-9 else 1.0)
        out.write(("param %s %d %d %.4g\n" % (label, rows, cols, error)).encode())
        out.write(np.asarray(exact[label]).astype("<f4").tobytes())
        worst = max(worst, (error, label))
    print("%-28s loss %.6f, %d parameters, %d of %d targets; rounded: %.4g of %s" % (
        name, loss, sum(x.size for x in p.values()), valid, batch * seq, *worst))


def main():
    with open(sys.argv[1], "wb") as out:
        for i, case in enumerate(CASES):
            write_case(out, 1000 + i, case)


if __name__ == "__main__":
    main()
