#!/usr/bin/env python3
"""Golden samples: fixed documents of two sources, mixed, cut, in plain Python.

    python3 tests/oracle/data_index.py > tests/golden/data_index.txt

Needs xxhash. Documents are those of tests/data_tokens_build.h. Lines:
    stream SEED VALIDATION TOKENS DOCUMENTS DIGEST      docs/formats.md, "Index"
    sample SEED VALIDATION INDEX POSITION HASH          XXH3-128 of its 33 ids as u32; SEQ_LEN 32, epochs 0 to 2
"""
import struct

import xxhash

from data_mixture import held, key, mix
from data_order import position

SEQ_LEN = 32
FRACTION = 0.1
WEIGHTS = [0.82, 0.18]


def documents(source, count):
    state = 0x9E3779B97F4A7C15 * (source + 1) % 2**64
    out = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids = [256]
        for _ in range(1 + (state >> 33) % 97):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            ids.append((state >> 33) % 250)
        out.append(ids + [257])
    return out


def pack(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def words(h):
    return struct.pack("<QQ", h >> 64, h & (1 << 64) - 1)


def main():
    sources = [[(xxhash.xxh3_128_intdigest(pack(d)), d) for d in documents(i, n)] for i, n in enumerate((300, 120))]
    for seed in (1, 7, 2**63 + 5):
        for validation in (0, 1):
            mine = [[c for c in s if held(c[0], FRACTION) == bool(validation)] for s in sources]
            in_order = [sorted(s, key=lambda c: (key(0 if validation else seed, 0, c[0]), c[0])) for s in mine]
            order, _, _ = mix(WEIGHTS, [1.0, 1.0], [[len(d) for _, d in s] for s in in_order], [], 0, validation)
            taken, stream, digest = [0, 0], [], b""
            for source in order:
                c, ids = in_order[source][taken[source]]
                taken[source] += 1
                stream += ids
                digest += words(c) + struct.pack("<QQ", len(ids), source)
            print("stream", seed, validation, len(stream), len(order), xxhash.xxh3_128_hexdigest(digest))
            n = (len(stream) - 1) // SEQ_LEN
            for index in range(0, 3 * n, 3 if validation else 17):
                p = position(len(stream), SEQ_LEN, seed, 0, index)
                ids = stream[p * SEQ_LEN:p * SEQ_LEN + SEQ_LEN + 1]
                print("sample", seed, validation, index, p, xxhash.xxh3_128_hexdigest(pack(ids)))


if __name__ == "__main__":
    main()
