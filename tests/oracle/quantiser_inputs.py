"""BF16 inputs of the quantiser tests, made by Philox so that tests/cpu_quantisers_oracle_test.c
makes the same words: only integers and correctly rounded float64 + * / sqrt."""
import numpy as np

from quantiser_model import bf16, philox

KEY = 0x51A27153
SCALE = 9.344e-6  # about 1 / their standard deviation


def halves(i, stream):
    """Twice the sum of the eight 16-bit halves of one draw, less its mean: bell-shaped integers."""
    w = philox(KEY, i, stream, 0, 0).astype(np.int64)
    return 2 * ((w & 0xFFFF) + (w >> 16)).sum(0) - 8 * 65535


def bell(i):
    return halves(i, 1) * SCALE


def heavy(i):
    """Student's t with three degrees of freedom, nearly."""
    q = sum(halves(i, s) ** 2 for s in (2, 3, 4)) + 1
    return halves(i, 1) / np.sqrt(q / 3.0)


def word(i, stream=5):
    return philox(KEY, i, stream, 0, 0).astype(np.int64)


def values(name, rows, cols):
    r, c = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    i = r * cols + c
    if name == "bell":
        x = bell(i)
    elif name == "heavy":
        x = heavy(i)
    elif name == "chunks":  # 2^-8 .. 1, a magnitude every 128x128
        x = bell(i) * 2.0 ** -(word(r // 128 * 64 + c // 128)[0] % 9)
    elif name == "wide":  # a magnitude every 16x16, 2^-23 .. 1: scales underflow
        x = bell(i) * 2.0 ** -(word(r // 16 * 64 + c // 16)[0] % 24)
    elif name == "tiny":
        x = bell(i) * 1e-12
    elif name == "huge":  # near 2^123: sums of 16 are still finite
        x = bell(i) * 2.0**121
    elif name == "subnormal":
        x = bell(i) * 2.0**-129
    elif name == "zeros":
        x = np.where(word(i)[0] % 2 == 0, 0.0, -0.0)
    elif name == "sparse":  # zero strips, chunks, tiles, blocks and elements of either sign
        x = bell(i)
        for height, width, stream in ((128, 1 << 20, 6), (128, 128, 7), (32, 32, 8), (1, 16, 9), (1, 1, 10)):
            x = np.where(word(r // height * 4096 + c // width, stream)[0] % 5 < 2, x * 0.0, x)
    elif name == "outlier":  # one element of 1e4
        x = np.where(i == 5 * cols + 37, 1e4, bell(i))
    elif name == "lattice":  # small multiples of 1/8: ties, exact sums
        x = (word(i)[0] % 97 - 48) / 8.0
    elif name == "words":  # any finite BF16 bit pattern
        w = word(i)[0] & 0xFFFF
        return np.where((w & 0x7F80) == 0x7F80, w & 0xBFFF, w).astype(np.uint16)
    elif name == "nonfinite":  # a NaN or an infinity of either sign in some blocks
        w = word(r * 4096 + c // 8)
        special = np.array([0x7FC0, 0xFFC1, 0x7F80, 0xFF80])[w[1] % 4]
        return np.where((w[0] % 61 == 0) & (c % 8 == w[2] % 8), special, bf16(bell(i).astype(np.float32))).astype(np.uint16)
    else:
        raise ValueError(name)
    return bf16(x.astype(np.float32))


NAMES = ("bell", "heavy", "chunks", "wide", "tiny", "huge", "subnormal", "zeros", "sparse", "outlier", "lattice", "words", "nonfinite")
