"""Golden cells of stochastic rounding, for tests/cpu_stochastic_test.c.

    FP4D_ORACLE_SOURCES=DIR python tests/oracle/stochastic.py tests/golden/stochastic.txt

A cell is one element of a block of 32 under one of MXFP4's scale rules.  What
rounding may make of it needs no random numbers: the two E2M1 codes around it
and the probability of the upper one.  That is found here by a table search in
float64; two simulations with random numbers of their own, in NumPy and
microxcaling's `dither`, must agree with it, and with 4-sigma bounds cell by cell.

A line:  RULE BLOCK ELEMENT  X BYTE  LOW HIGH UP  COUNT
X is a BF16 word; BYTE the block's E8M0 scale; LOW and HIGH the codes' magnitudes, the same where
nothing is left to chance; UP the probability of HIGH; COUNT how often microxcaling went up in
DRAWS draws.  First line: DRAWS.
"""
import os
import sys

import numpy as np
import quantiser_model as model
import torch
from quantiser_model import E2M1, F32, F64, bf16, bf16_value

sys.path.insert(0, os.path.join(os.environ["FP4D_ORACLE_SOURCES"], "microxcaling"))
from mx.elemwise_ops import _quantize_elemwise_core  # noqa: E402
from mx.formats import _get_format_params  # noqa: E402

DRAWS = 20000
RULES = ("encode", "decode", "floor")


def blocks():
    """[blocks, 32] BF16 words: bell-shaped, heavy-tailed, ties and codes, zeros, tiny and subnormal, huge."""
    rng = np.random.default_rng(20240607)
    bell = rng.standard_normal((4, 32))
    heavy = rng.standard_t(2, (3, 32)) * np.array([[1e-12], [1.0], [1e6]])
    # eighths of a power of two: by `encode` 0.75 t, codes and the tie at 0.75; by `floor` every tie and code
    lattice = np.stack([np.arange(32) * (-1.0) ** np.arange(32) / 32, np.arange(1, 33) / 4.0])
    one = np.zeros((1, 32))
    one[0, 5] = -3.25
    one[0, 6:] = -0.0
    zero = np.where(np.arange(32) % 2, -0.0, 0.0)[None]
    outlier = np.where(np.arange(32) == 9, 1e4, bell[:1])
    x = bf16(np.concatenate([bell, heavy, lattice, one, zero, outlier]).astype(F32))
    subnormal = (rng.integers(0, 128, 32) | rng.integers(0, 2, 32) << 15).astype(np.uint16)
    mixed = np.where(np.arange(32) % 3 == 0, subnormal, bf16((bell[1] * 2.0**-126).astype(F32)))
    huge = (rng.integers(0, 2, 32) << 15 | rng.integers(0x7B00, 0x7E80, 32)).astype(np.uint16)
    return np.concatenate([x, [subnormal, mixed, huge]])


def expected(t):
    """(low, high, probability of high) of |t|, float64."""
    a = np.abs(t)
    low = np.minimum(np.searchsorted(E2M1, a, side="right") - 1, 7)
    high = np.minimum(low + 1, 7)
    up = np.where(low == high, 0.0, (a - E2M1[low]) / np.maximum(E2M1[high] - E2M1[low], 0.5))
    return low, np.where(up > 0, high, low), up


def bounded(what, count, up):
    sigma = np.sqrt(np.maximum(up * (1 - up), 1e-12) * DRAWS)
    worst = (np.abs(count - up * DRAWS) / sigma)[up > 2.0**-17].max()
    if not (worst < 4 and (count[up == 0] == 0).all()):
        sys.exit(f"{what}: {worst:.2f} sigma from the probability")
    return worst


def numpy_counts(t, rng):
    """Rounding as such: a place between two values against a uniform number."""
    low, high, up = expected(t)
    return (rng.random((DRAWS, *t.shape)) < up).sum(0)


def microxcaling_counts(t):
    exponent_bits, mantissa_bits, _, largest, _ = _get_format_params("fp4_e2m1")
    _, high, up = expected(t)
    drawn = _quantize_elemwise_core(
        torch.from_numpy(np.broadcast_to(t.astype(F32), (DRAWS, *t.shape)).copy()),
        mantissa_bits, exponent_bits, largest, round="dither", saturate_normals=True,
    )
    return ((np.abs(drawn.numpy()) == E2M1[high]) & (up > 0)).sum(0)


def main(path):
    torch.manual_seed(11)
    rng = np.random.default_rng(12)
    words = blocks()
    z = bf16_value(words)
    with open(path, "w") as out:
        print(DRAWS, file=out)
        for rule in RULES:
            byte = model.mx(z, rule, 0, None).scales[:, :1].astype(np.int64)
            # codes are of 6 z / s, by the OCP rule of z / s; byte 0 is also a block of zeros
            t = z.astype(F64) * model.power(127 - byte) * (1 if rule == "floor" else 6)
            t = np.where(np.abs(z).max(1, keepdims=True) == 0, 0.0, t)
            low, high, up = expected(t)
            count = microxcaling_counts(t)
            worst = bounded("numpy, " + rule, numpy_counts(t, rng), up), bounded("microxcaling, " + rule, count, up)
            print(f"{rule}: {(up > 0).sum()} of {t.size} cells drawn; numpy {worst[0]:.2f}, microxcaling {worst[1]:.2f} sigma")
            for b, e in np.ndindex(t.shape):
                fields = (rule, b, e, f"{words[b, e]:04x}", byte[b, 0], low[b, e], high[b, e], f"{up[b, e]:.9g}", count[b, e])
                print(*fields, file=out)


if __name__ == "__main__":
    main(sys.argv[1])
