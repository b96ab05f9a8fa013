#!/usr/bin/env python3
"""Random bytes near UTF-8, and what Python's errors="replace" makes of them: hexadecimal lines BYTES TEXT REPLACEMENTS."""
import random

rng = random.Random(11)
EDGES = [0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed, 0xee, 0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff]


def some():
    kind = rng.randrange(3)
    if kind == 0:
        return bytes(rng.choice(EDGES) for _ in range(rng.randrange(1, 12)))
    whole = "".join(chr(rng.choice([0x41, 0xe9, 0x7ff, 0x800, 0xd7ff, 0xe000, 0xffff, 0x10000, 0x10ffff])) for _ in range(rng.randrange(1, 12))).encode()
    if kind == 1:
        return whole[:rng.randrange(len(whole) + 1)]
    cut = bytearray(whole + b"plain text of more than eight bytes" * rng.randrange(2) + whole)
    for _ in range(rng.randrange(1, 4)):
        cut[rng.randrange(len(cut))] = rng.choice(EDGES)
    return bytes(cut)


def main():
    for _ in range(600):
        data = some()
        text = data.decode("utf-8", "replace")
        print(data.hex() or "-", text.encode().hex() or "-", text.count("\ufffd") - data.count("\ufffd".encode()))


main()
