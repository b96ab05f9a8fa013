"""A literal Llama in float64 JAX: the model of model/model.h, and what is drawn for it.

Nothing here comes from the C sources: interleaved rotary pairs, gradients by
jax.grad.  Parameters and tokens are drawn by Philox4x32-10, so that
tests/model_gradient_test.c can make them too; every parameter is a number
that BF16 holds exactly.
"""
import jax
import jax.numpy as jnp
import numpy as np
from quantiser_model import philox

jax.config.update("jax_enable_x64", True)

DRAW_PARAMETER, DRAW_TOKEN = 1, 2


def words(key, n, c1, c2):
    """Element i takes word i % 4 of block i / 4."""
    return philox(key, np.arange((n + 3) // 4), c1, c2, 0).T.reshape(-1)[:n].astype(np.int64)


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
    w = philox(key, np.arange(n), 0, DRAW_TOKEN, 0).astype(np.int64)
    inputs = np.where(w[3] % 2 == 0, w[0] % vocab, w[0] % 5)
    targets = np.where(ignored & (w[2] % 4 == 0), -1, w[1] % vocab)
    return inputs, targets


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
