#!/usr/bin/env python3
"""Golden near-duplicates and overlaps: data/words.h, minhash.h and overlap.h in plain Python.

    python3 tests/oracle/near_duplicates.py > tests/golden/near_duplicates.txt

Texts are in hexadecimal ("-": empty), `N*TEXT` is TEXT N times.  Lines:
  sign TEXT POSITIONS            112 times 4 hexadecimal digits
  document TEXT                  one more of the corpus
  group THRESHOLD GROUPS DROPPED SURVIVORS     of the corpus; a digit a document
  split N                        the corpus' first N documents are the validation side
  overlap GRAMS SHARED           a line for each of the other documents
  side GRAMS DISTINCT MET        of the validation side, after all of them
"""
import itertools
import random
import re
import struct

import xxhash

SPACE = re.compile(rb"[ \t\n\v\f\r]+")
LOWER = bytes(c + 32 if 65 <= c <= 90 else c for c in range(256))


def word_hash(word):
    h = 0
    for at in range(0, len(word), 256):
        h = xxhash.xxh3_64_intdigest(word[at:at + 256], h)
    return h


def words(text):
    return [word_hash(w) for w in SPACE.split(text.translate(LOWER)) if w]


def grams(hashes, n):
    return [xxhash.xxh3_64_intdigest(struct.pack(f"<{n}Q", *hashes[i:i + n])) for i in range(len(hashes) - n + 1)]


FAMILY = []
for i in range(112):
    high, low = divmod(xxhash.xxh3_128_intdigest(b"minhash\0" + struct.pack("<Q", i)), 1 << 64)
    FAMILY.append((low & 0xFFFFFFFF | 1, high & 0xFFFFFFFF | 1))


def signature(text):
    hashes = words(text)
    shingles = set(grams(hashes, min(5, len(hashes)))) if hashes else set()
    if not shingles:
        return [65535] * 112
    return [min((a * (x & 0xFFFFFFFF) + b * (x >> 32)) % 2**32 for x in shingles) % 65536 for a, b in FAMILY]


def similar(a, b):
    return sum(x == y for x, y in zip(a, b)) / 112


def group(signatures, threshold):
    """Edges as in data/minhash.h, components by repeated relabelling."""
    edges = []
    for band in range(14):
        shared = {}
        for d, s in enumerate(signatures):
            if s != [65535] * 112:
                shared.setdefault(tuple(s[8 * band:8 * band + 8]), []).append(d)
        for members in shared.values():
            chosen = []
            for d in members:
                to = next((r for r in chosen if threshold == 0 or similar(signatures[r], signatures[d]) >= threshold), None)
                if to is not None:
                    edges.append((to, d))
                elif len(chosen) < 32:
                    chosen.append(d)
    label = list(range(len(signatures)))
    changed = True
    while changed:
        changed = False
        for a, b in edges:
            low = min(label[a], label[b])
            changed |= label[a] != low or label[b] != low
            label[a] = label[b] = low
    sizes = [label.count(d) for d in range(len(label))]
    return sum(s > 1 for s in sizes), sum(s - 1 for s in sizes if s > 1), "".join(str(int(l == d)) for d, l in enumerate(label))


def shown(text, times=1):
    return (f"{times}*" if times > 1 else "") + (text.hex() or "-")


def special():
    yield b"", 1
    yield b" \t\r\n\v\f ", 1
    yield b"one", 1
    yield b"\0", 1
    yield b"One two\0Three FOUR", 1
    yield b"  one\ttwo\n\nthree\rfour five", 1
    yield b"ONE TWO THREE FOUR FIVE", 1
    yield b"one two three four five six", 1
    yield b"a\x85b c\xa0d \xff\xfe \xc3 \xc3\x89t\xc3\xa9 [`{@ \x00\x00 z", 1
    yield b"the same five words again ", 50
    for length in (255, 256, 257, 512, 700):
        yield b"ab cd Xy"[length % 8:] + b" X" + b"q" * length + b" ef gh", 1
    yield b"x", 100000
    yield b"to be or not that is ", 2000


def corpus(draw):
    vocabulary = [f"{c}{d}" for c in "abcdefghij" for d in range(20)]
    documents = []
    for _ in range(50):
        documents.append([draw.choice(vocabulary) for _ in range(draw.choice((1, 3, 12, 13, 14, 20, 40, 60)))])
        for _ in range(draw.randrange(4)):
            copy = list(draw.choice(documents[-4:]))
            for _ in range(draw.randrange(4)):
                copy[draw.randrange(len(copy))] = draw.choice(vocabulary)
            if draw.random() < .5:
                copy += [draw.choice(vocabulary) for _ in range(draw.randrange(9))]
            documents.append(copy)
    draw.shuffle(documents)
    texts = []
    for d in documents:
        texts.append(b"".join((w.upper() if draw.random() < .1 else w).encode() + draw.choice((b" ", b" ", b" ", b"\n", b"\t "))
                              for w in d))
    return texts + [b"", b"\n"]


def main():
    for text, times in special():
        print("sign", shown(text, times), "".join(f"{p:04x}" for p in signature(text * times)))
    texts = corpus(random.Random(20261130))
    for text in texts:
        print("document", shown(text))
    signatures = [signature(t) for t in texts]
    for threshold in (0, 0.5, 0.75, 0.9, 1):
        print("group", threshold, *group(signatures, threshold))
    for split in (0, 50):
        known = list(itertools.chain(*(grams(words(t), 13) for t in texts[:split])))
        found = [grams(words(t), 13) for t in texts[split:]]
        print("split", split)
        for g in found:
            print("overlap", len(g), sum(x in set(known) for x in g))
        print("side", len(known), len(set(known)), len(set(known) & set(itertools.chain(*found))))


main()
