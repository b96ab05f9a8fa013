#!/usr/bin/env python3
"""Golden batches of whole runs: from text files to the batch_hash of every update.

    python3 tests/oracle/data_run.py > tests/golden/data_run.txt

Needs xxhash. What docs/formats.md says of documents, mixture, order of samples and the hash of a batch,
in plain Python, on the corpora of tests/token_files.py. A line a run:

    run NAME TRAIN_TOKENS TRAIN_DOCUMENTS VALIDATION_TOKENS VALIDATION_DOCUMENTS BATCH_HASH...

tests/data_run_cases.py says what each NAME is configured as; trainer_data_test.py configures the program by it.
"""
import os
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from data_mixture import held, key, words, xxh  # noqa: E402
from data_order import permute  # noqa: E402
from data_run_cases import CASES, GLOBAL_BATCH, SEQ_LEN, sources  # noqa: E402
from token_files import encode  # noqa: E402


def content(ids):
    return xxh(struct.pack(f"<{len(ids)}I", *ids))


def distinct(texts):
    """Exact deduplication: of texts that are equal but for case and white space the first stays."""
    seen, kept = set(), []
    for source, text in texts:
        normal = b" ".join(text.lower().split())
        if normal not in seen:
            seen.add(normal)
            kept.append((source, text))
    return kept


def order(documents, case, validation):
    """documents: a list of (hash, ids) by source."""
    seed = 0 if validation else case["seed"]
    stages = case["stages"] or [(0, case["weights"])]
    repetition = [1.0] * len(documents) if validation else case["max_repetition"]
    if not any(any(w) for _, w in stages):
        documents, stages, repetition = [sum(documents, [])], [(0, [1.0])], [1.0]
    if validation:
        stages = stages[:1]
    target = 0 if validation else case["tokens"]
    total = [sum(len(ids) for _, ids in d) for d in documents]
    passes = [0] * len(documents)
    queues, taken_ever = [[] for _ in documents], [0] * len(documents)
    out = []
    for number, (_, weights) in enumerate(stages):
        weights = [w / sum(weights) for w in weights]
        until = stages[number + 1][0] if number + 1 < len(stages) else float("inf")
        taken = [0] * len(documents)
        while len(out) < until and not (target and len(out) >= target):
            deficits = [w * (sum(taken) + 1) - t if w > 0 else float("-inf") for w, t in zip(weights, taken)]
            s = deficits.index(max(deficits))
            if taken_ever[s] >= repetition[s] * total[s]:
                return out
            if not queues[s]:
                queues[s] = sorted(documents[s], key=lambda d: (key(seed, passes[s], d[0]), d[0])) if case["shuffle_documents"] else list(documents[s])
                passes[s] += 1
            ids = queues[s].pop(0)[1]
            starts.append(len(out))
            out += ids
            taken[s] += len(ids)
            taken_ever[s] += len(ids)
    return out


starts = []  # of documents in the stream made last


def batches(stream, firsts, case):
    n = (len(stream) - 1) // SEQ_LEN
    firsts = set(firsts)
    skip = set()
    for first, last in case["skip"]:
        skip |= set(range(first, last + 1))
    index, out = 0, []  # of the order
    for update in range(case["updates"]):
        total = 0
        for k in range(update * GLOBAL_BATCH, (update + 1) * GLOBAL_BATCH):
            while index in skip:
                index += 1
            epoch, x = divmod(index, n)
            if n > 1 and (epoch or case["shuffle_samples"]):
                x = permute(x, n, case["seed"], epoch)
            at = x * SEQ_LEN
            inputs, targets = stream[at:at + SEQ_LEN], stream[at + 1:at + SEQ_LEN + 1]
            if case["boundary"] == "mask":
                targets = [-1 if at + 1 + j in firsts else t for j, t in enumerate(targets)]
            pack = f"<{SEQ_LEN}i"
            total += xxh(struct.pack("<QQ", k, SEQ_LEN) + words(xxh(struct.pack(pack, *inputs))) + words(xxh(struct.pack(pack, *targets))))
            index += 1
        out.append(total % 2**128)
    return out


def main():
    for name, case in CASES.items():
        kept = distinct([(s, t) for s, texts in enumerate(sources()) for t in texts])
        sides = [[[] for _ in sources()] for _ in range(2)]
        for source, text in kept:
            ids = encode(text, case["bos"], case["eos"])
            c = content(ids)
            sides[held(c, case["validation_fraction"])][source].append((c, ids))
        starts.clear()
        validation = order(sides[1], case, True)
        n_validation = len(starts)
        starts.clear()
        train = order(sides[0], case, False)
        print("run", name, len(train), len(starts), len(validation), n_validation, *(f"{h:032x}" for h in batches(train, starts, case)))


if __name__ == "__main__":
    main()
