#!/usr/bin/env python3
"""Golden sample positions: docs/formats.md, "Order of samples", in plain Python.

    python3 tests/oracle/data_order.py > tests/golden/data_order.txt

Lines: tokens seq_len seed shuffle_samples index position.
"""

M32 = 0xFFFFFFFF


def philox(key, counter):
    k0, k1 = key & M32, key >> 32
    c = list(counter)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & M32, p0 >> 32 ^ c[3] ^ k1, p0 & M32]
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return c


def permute(x, n, seed, epoch):
    key = seed ^ 0x6F72646572  # "order"
    bits = (n - 1).bit_length()
    while True:
        low = bits - bits // 2
        widths = [bits // 2, low]
        left, right = x >> low, x & ((1 << low) - 1)
        for r in range(8):
            f = philox(key, [right, r, epoch & M32, epoch >> 32])[0]
            left, right = right, (left ^ f) & ((1 << widths[0]) - 1)
            widths.reverse()
        x = left << low | right
        if x < n:
            return x


def position(tokens, seq_len, seed, shuffle, index):
    n = (tokens - 1) // seq_len
    epoch, x = divmod(index, n)
    return x if (epoch == 0 and not shuffle) or n == 1 else permute(x, n, seed, epoch)


def main():
    for tokens, seq_len in [(9, 8), (24, 8), (57, 8), (1000, 7), (100003, 64), (1 << 30, 5), ((1 << 32) + 77, 3)]:
        n = (tokens - 1) // seq_len
        for seed in (0, 1, 0x123456789ABCDEF0):
            for shuffle, epoch in ((1, 0), (0, 0), (0, 1), (1, 1), (0, 2), (0, 3), (0, 1 << 20), (0, 1 << 33)):
                for j in sorted({0, 1, n // 3, n // 2, n - 1}):
                    i = epoch * n + j
                    if j < n and i < 1 << 62:
                        print(tokens, seq_len, seed, shuffle, i, position(tokens, seq_len, seed, shuffle, i))


if __name__ == "__main__":
    main()
