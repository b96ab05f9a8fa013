#!/usr/bin/env python3
"""Real text in six trainers' token files: the same samples whatever file they came in.

    tests/peer/same_samples.py PROGRAM VOCABULARY NAME=WEIGHT=FOLDER...

Each FOLDER of text is tokenised by `fp4d prepare` as it stands, its documents are put into another order and written as
Megatron (u16 and i32), llm.c, nanoGPT, OLMo and torchtitan write them (tests/token_files.py).  Then a small model reads the
mixture for 60 updates of 8 x 1024 tokens: once from the stream that `prepare` makes of the text, and from the index over each
kind of file, at one and two ranks.  Every batch hash has to be the same.  Works in a folder of its own; about a minute when quiet.
"""
import json
import os
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import token_files  # noqa: E402

BASE = """\
model: {{vocab_size: {vocab}, hidden_size: 32, ffn_size: 32, n_layers: 1, n_heads: 2, rope_theta: 10000}}
train: {{updates: 60, global_batch: 8, local_batch: {local}, seq_len: 1024}}
validation: {{samples: 8}}
log: {{every: 1000}}
data:
  tokenizer: {vocabulary}
  dedup: none
  train: {train}
  validation: '{validation}'
  validation_fraction: 0.02
"""

# name, suffix of its file, format, do documents end where the EOS id says so, ranks, local batch
KINDS = (("megatron u16", ".mg16.bin", "megatron", False, 2, 4), ("megatron i32", ".mg32.bin", "megatron", False, 1, 4),
         ("llm.c", ".llmc.bin", "llmc", True, 1, 8), ("nanoGPT", ".raw.bin", "raw-u16", True, 1, 2),
         ("OLMo", ".olmo.npy", "raw-u16", True, 1, 1), ("torchtitan", ".titan/tokens.bin", "raw-u32", False, 2, 2))


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def write(path, documents):
    token_files.write_megatron(path + ".mg16", documents, 2)
    token_files.write_megatron(path + ".mg32", documents, 4)
    token_files.write_llmc(path + ".llmc.bin", documents, 4)
    token_files.write_raw(path + ".raw.bin", documents, 2)
    token_files.write_raw(path + ".olmo.npy", documents, 2)
    os.makedirs(path + ".titan")
    token_files.write_titan(path + ".titan/tokens.bin", path + ".titan/offsets.npy", documents)


def main():
    program, vocabulary, *named = sys.argv[1:]
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    sources = [entry.split("=") for entry in named]
    with tempfile.TemporaryDirectory() as work:
        at = lambda *parts: os.path.join(work, *parts)
        vocab, eos = 0, -1

        def configure(name, train, validation, entries, local=4, more=""):
            with open(at(name), "w") as f:
                f.write(BASE.format(vocab=vocab or 1 << 17, local=local, vocabulary=vocabulary, train=train, validation=validation) + more)
                f.write("  sources:\n" + "".join(f"    - {{{entry}}}\n" for entry in entries))
            return at(name)

        for name, _, folder in sources:
            config = configure("alone.yaml", at(name + ".tokens"), "", [f"path: {folder}"], more="  shuffle_documents: false\n")
            run(program, "prepare", config)
            stream = token_files.Stream(at(name + ".tokens"))
            documents = stream.documents
            vocab, eos = stream.vocab_size, stream.eos
            print(f"{name}: {len(documents)} documents, {len(stream.ids)} tokens")
            random.Random(5).shuffle(documents)
            write(at(name), documents)

        expected = None
        for kind, suffix, form, ends, ranks, local in (("text", "", "text", False, 1, 4),) + KINDS:
            text = form == "text"
            entries = [f"path: {folder if text else at(name + suffix)}, name: {name}, weight: {weight}, format: {form}" +
                       (f", eos: {eos}" if ends else "") for name, weight, folder in sources]
            stem = kind.replace(" ", "-")
            ending = ".tokens" if text else ".index"
            config = configure(stem + ".yaml", at(stem + ending), at(stem + "-validation" + ending), entries, local)
            run(program, "prepare" if text else "index", config)
            launch = ["mpirun", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
            run(*launch, program, "train", config, "--set", "run.folder=" + at("run-" + stem))
            with open(at("run-" + stem, "metrics.jsonl")) as f:
                records = [json.loads(line) for line in f]
            updates = [r for r in records if r["kind"] == "update"]
            found = [r["batch_hash"] for r in updates]
            expected = expected or found
            tokens = {name: r["tokens"] for name, r in updates[-1]["sources"].items()}
            print(f"{kind:13} {ranks} rank{'s' if ranks > 1 else ' '}, local batch {local}: {len(found)} batch hashes, the first {found[0]}; "
                  f"{'as from text' if found == expected else 'DIFFERENT'}; tokens {tokens}")
            if found != expected:
                sys.exit(1)


main()
