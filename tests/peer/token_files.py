#!/usr/bin/env python3
"""Token files written by the tools themselves, and what `fp4d index` makes of them.

    BUILD=build python3 tests/peer/token_files.py [--llmc FOLDER]

Needs numpy, torch and megatron-core; --llmc: dev/data of a checkout of llm.c (with requests and tqdm).
The same documents are written by Megatron-LM's IndexedDatasetBuilder (int32, uint16, several sequences a
document, and two files merged by add_index), by llm.c's write_datafile, by numpy.memmap as OLMo does and by numpy.save.
Each is indexed with the same mixture; the content digests must be one, and Megatron's own reader
must give the tokens of every document as they stand in the index.
"""
import argparse
import os
import random
import re
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import numpy as np  # noqa: E402
import torch  # noqa: E402

PROGRAM = os.path.join(os.path.abspath(os.environ.get("BUILD", "build")), "fp4d")
BOS, EOS = 256, 257


def documents(seed, count):
    r = random.Random(seed)
    return [[BOS] + [r.randrange(250) for _ in range(r.randint(1, 700))] + [EOS] for _ in range(count)]


def megatron(path, docs, dtype, split=False):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    builder = IndexedDatasetBuilder(path + ".bin", dtype=dtype)
    for d in docs:
        lengths = [3, len(d) - 3] if split and len(d) > 5 else [len(d)]
        builder.add_document(torch.tensor(d), lengths)
    builder.finalize(path + ".idx")


def megatron_merged(path, docs, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    half = len(docs) // 2
    megatron(path + "-1", docs[:half], dtype)
    megatron(path + "-2", docs[half:], dtype)
    builder = IndexedDatasetBuilder(path + ".bin", dtype=dtype)
    builder.add_index(path + "-1")
    builder.add_index(path + "-2")
    builder.finalize(path + ".idx")


def memmap(path, docs, dtype):
    flat = [i for d in docs for i in d]
    m = np.memmap(path, dtype=dtype, mode="w+", shape=(len(flat),))
    m[:] = flat
    m.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--llmc")
    arguments = parser.parse_args()
    forms = {
        "megatron int32": (lambda p, d: megatron(p, d, np.int32), ".idx", {}),
        "megatron uint16": (lambda p, d: megatron(p, d, np.uint16), ".idx", {}),
        "megatron, two sequences": (lambda p, d: megatron(p, d, np.int32, True), ".idx", {}),
        "megatron, merged": (lambda p, d: megatron_merged(p, d, np.int32), ".idx", {}),
        "memmap uint32 (OLMo)": (lambda p, d: memmap(p + ".npy", d, np.uint32), ".npy", {"format": "raw-u32", "eos": EOS}),
        "memmap uint16 (nanoGPT)": (lambda p, d: memmap(p + ".bin", d, np.uint16), ".bin", {"format": "raw-u16", "bos": BOS}),
        "memmap and offsets.npy (torchtitan)": (
            lambda p, d: (memmap(p + ".bin", d, np.uint32), np.save(p + ".offsets.npy", np.cumsum([0] + [len(x) for x in d]))),
            ".bin", {"format": "raw-u32"}),
        "numpy.save int64": (lambda p, d: np.save(p + ".npy", np.array([i for x in d for i in x])), ".npy", {"eos": EOS}),
    }
    if arguments.llmc:
        sys.path.insert(0, arguments.llmc)
        from data_common import write_datafile
        for model in ("gpt-2", "llama-3"):
            forms["llm.c " + model] = (lambda p, d, m=model: write_datafile(p + ".bin", [i for x in d for i in x], m), ".bin", {"bos": BOS})
    sources = {"a": documents(1, 400), "b": documents(2, 150)}
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (write, ending, words)) in enumerate(forms.items()):
            entries = []
            for source, weight in (("a", 0.82), ("b", 0.18)):
                path = os.path.join(folder, f"{number}-{source}")
                write(path, sources[source])
                entries.append({"path": path + ending, "name": source, "weight": weight, **words})
            index = os.path.join(folder, f"{number}.index")
            config = os.path.join(folder, f"{number}.yaml")
            with open(config, "w") as f:
                f.write("model: {vocab_size: 258, hidden_size: 64, ffn_size: 128, n_layers: 2, n_heads: 2, n_kv_heads: 1}\n"
                        f"data: {{train: {index}, sources: {entries}}}\ntrain: {{updates: 9, global_batch: 1, local_batch: 1, seq_len: 64}}\n"
                        "optimizer: {warmup_updates: 0}\n".replace("'", '"'))
            subprocess.run([PROGRAM, "index", config], check=True, stderr=subprocess.DEVNULL)
            out = subprocess.run([PROGRAM, "inspect", index, "--verify"], check=True, capture_output=True, text=True).stdout
            digest = re.search(r"digest +([0-9a-f]{32})", out).group(1)
            digests.add(digest)
            print(f"{name:40} {re.search(r'tokens +([0-9]+)', out).group(1):>8} tokens  {digest}")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        read = IndexedDataset(os.path.join(folder, "0-a"))
        assert [list(map(int, read[k])) for k in range(len(read))] == sources["a"], "Megatron's reader"
    print("one digest" if len(digests) == 1 else f"{len(digests)} digests")
    return len(digests) != 1


if __name__ == "__main__":
    sys.exit(main())
