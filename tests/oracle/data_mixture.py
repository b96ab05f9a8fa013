#!/usr/bin/env python3
"""Golden orders of documents: docs/formats.md, "Order of documents", in plain Python.

    python3 tests/oracle/data_mixture.py > tests/golden/data_mixture.txt

Needs xxhash. Lines (doubles as hexadecimal, hashes as 32 digits):
    key SEED PASS CONTENT KEY
    held CONTENT FRACTION 0|1
    mix SOURCES STAGES TARGET VALIDATION, followed by
      source WEIGHT MAX_REPETITION N LENGTH...       for each source: its documents in the order of pass 0
      stage AT WEIGHT...                             for each stage
      order N SOURCE...                              the documents that come, and
      end SOURCE WRITTEN UNUSED...                   the source that could give no more, -1: target reached
Lengths of a source's documents are the same in every pass but turned by the pass's number.
"""
import random
import struct

import xxhash


def xxh(data):
    return xxhash.xxh3_128_intdigest(data)


def words(h):
    return struct.pack("<QQ", h >> 64, h & (1 << 64) - 1)


def key(seed, turn, content):
    return xxh(b"order\0\0\0" + struct.pack("<QQ", seed, turn) + words(content))


def held(content, fraction):
    return (xxh(b"holdout\0" + struct.pack("<Q", 0) + words(content)) >> 64) / 2.0**64 < fraction


def mix(weights, repetitions, documents, stages, target, validation):
    """Lists by source; stages: [(at, weights)]. Returns the order, the last source asked, tokens of each."""
    stages = stages or [(0, weights)]
    if not any(any(w) for _, w in stages):  # a pool
        documents, stages, repetitions = [[d for source in documents for d in source]], [(0, [1.0])], [1.0]
    if validation:
        stages, repetitions, target = stages[:1], [1.0] * len(documents), 0
    given, order, everything = [0] * len(documents), [], [sum(d) for d in documents]
    for number, (_, shares) in enumerate(stages):
        total = 0.0
        for w in shares:
            total += w
        shares = [w / total for w in shares]
        until = stages[number + 1][0] if number + 1 < len(stages) else None
        taken, n = [0] * len(documents), 0
        while until is None or sum(given) < until:
            if target and sum(given) >= target:
                return order, -1, given
            deficits = [(w * float(n + 1) - float(t), -i) for i, (w, t) in enumerate(zip(shares, taken)) if w > 0]
            source = -max(deficits)[1]
            if not given[source] < repetitions[source] * everything[source]:
                return order, source, given
            mine = [s for s in order if s == source]
            turn, place = divmod(len(mine), len(documents[source]))
            length = documents[source][(place + turn) % len(documents[source])]
            order.append(source)
            given[source] += length
            taken[source] += length
            n += length


def main():
    r = random.Random(20261130)
    for _ in range(40):
        content, seed, turn = r.getrandbits(128), r.getrandbits(r.choice([1, 8, 64])), r.choice([0, 1, 2, 1 << 40])
        print("key", seed, turn, f"{content:032x}", f"{key(seed, turn, content):032x}")
    for _ in range(200):
        content, fraction = r.getrandbits(128), r.choice([0.0, 0.01, 0.5, 0.99, 1.0])
        print("held", f"{content:032x}", fraction.hex(), int(held(content, fraction)))
    for case in range(60):
        n = r.choice([1, 2, 2, 2, 3, 5])
        weighted = r.random() < 0.85
        weights = [r.choice([0.82, 0.18, 1.0, 3.0, 1e-3, r.random() + 0.01]) if weighted else 0.0 for _ in range(n)]
        if case < 6:
            n, weights = 2, [0.82, 0.18]
        repetitions = [r.choice([1.0, 1.0, 2.0, 0.5, 3.7, 0.01]) for _ in range(n)]
        longest = r.choice([1, 5, 50, 100000])
        documents = [[r.randint(1, longest) for _ in range(r.randint(1, 40))] for _ in range(n)]
        if r.random() < 0.1:
            documents[r.randrange(n)] = []
        stages = []
        if weighted and r.random() < 0.4:
            at = 0
            for _ in range(r.randint(1, 4)):
                shares = [r.choice([0.0, 0.5, 1.0, r.random()]) for _ in range(n)]
                shares[r.randrange(n)] = 0.7
                stages.append((at, shares))
                at += r.randint(1, 20 * longest)
        if stages:
            weights = [0.0] * n
        total = sum(sum(d) for d in documents)
        target = r.choice([0, 0, r.randint(1, total + 1), 10**15])
        validation = int(r.random() < 0.2)
        order, last, given = mix(weights, repetitions, documents, stages, target, validation)
        print("mix", n, len(stages), target, validation)
        for w, m, d in zip(weights, repetitions, documents):
            print("source", w.hex(), m.hex(), len(d), *d)
        for at, shares in stages:
            print("stage", at, *(w.hex() for w in shares))
        print("order", len(order), *order)
        pool = not stages and not any(weights)
        groups = [sum(map(sum, documents))] if pool else [sum(d) for d in documents]
        print("end", last, sum(given), *(max(0, a - g) for a, g in zip(groups, given)))


if __name__ == "__main__":
    main()
