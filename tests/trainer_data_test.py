#!/usr/bin/env python3
"""Corpora and token files to batches, seen from outside: golden batches of whole runs, the same
documents in the files of five trainers, resumes across files and epochs, indexes, what is refused.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import os
import re
import shutil
import sys
import tempfile

import data_run_cases
import token_files
from data_run_cases import CASES, GLOBAL_BATCH, SEQ_LEN
from fp4d import CONFIG, CONFIG_BASE, DATA, DONE, PREEMPTED, PROGRAM, ROOT, Job, Place, check, main, processor_seconds, same, write_config, words
from token_files import BOS, EOS, VOCAB, Stream, corpus, encode


class Bench(Place):
    """A folder, and configurations by name; nothing is prepared."""

    def __init__(self):
        self.path = tempfile.mkdtemp(prefix="fp4d-test-")
        self.program = PROGRAM
        self.seen = {}

    def config(self, name, sources=(), kind="train", **settings):
        """NAME.yaml of the tiny model; its training stream is NAME.train, or NAME.index of token files."""
        write_config(self.at(name + ".yaml"), {
            **CONFIG_BASE, "model.hidden_size": 32, "model.ffn_size": 32, "model.n_layers": 1, "model.n_heads": 1, "model.n_kv_heads": 1,
            "train.seq_len": SEQ_LEN, "train.global_batch": GLOBAL_BATCH, "train.local_batch": 1, "optimizer.warmup_updates": 0,
            "validation.samples": 2, "run.folder": name, "data.train": f"{name}.{kind}", "data.validation": "",
            "data.validation_fraction": 0, "data.sources": list(sources), **{k.replace("__", "."): v for k, v in settings.items()}})
        return name + ".yaml"

    def go(self, name, folder=None, np=0, **settings):
        more = {"run.folder": folder or name, **{k.replace("__", "."): v for k, v in settings.items()}}
        return self.command("train", name + ".yaml", *words(more), np=np)

    def hashes(self, folder):
        return self.column(folder, "batch_hash")

    def digest(self, folder):
        return self.lines(folder, "start")[-1]["train_digest"]


place = Bench()


def golden():
    found = {}
    with open(os.path.join(ROOT, "tests", "golden", "data_run.txt")) as f:
        for line in f:
            fields = line.split()
            found[fields[1]] = [int(x) for x in fields[2:6]], fields[6:]
    return found


def settings_of(case):
    given = {"data.seed": case["seed"], "data.shuffle_documents": case["shuffle_documents"], "data.shuffle_samples": case["shuffle_samples"],
             "data.boundary": case["boundary"], "data.bos": case["bos"], "data.eos": case["eos"], "data.tokens": case["tokens"],
             "data.validation_fraction": case["validation_fraction"], "train.updates": case["updates"],
             "data.skip": [f"{a}-{b}" for a, b in case["skip"]]}
    if case["stages"]:
        given["data.stages"] = [{"at": at, "weights": w} for at, w in case["stages"]]
    return given


def source_entries(case, paths, **more):
    return [{"path": p, "name": name, "max_repetition": m, **({} if case["stages"] else {"weight": w}), **more}
            for p, name, w, m in zip(paths, ("alpha", "beta"), case["weights"], case["max_repetition"])]


# ---- golden batches --------------------------------------------------------------


def golden_run(name):
    """From text to the hash of every batch, against an independent program."""
    case, (counts, hashes) = CASES[name], golden()[name]
    if not os.path.exists(place.at("alpha")):
        for folder, documents in zip(("alpha", "beta"), data_run_cases.sources()):
            token_files.write_texts(place.at(folder), documents)
    config = place.config(name, source_entries(case, ("alpha", "beta")), **{"data.validation": name + ".validation", **settings_of(case)})
    out = place.command("prepare", config).expect(DONE)
    train, validation = Stream(place.at(name + ".train")), Stream(place.at(name + ".validation"))
    made = [len(train.ids), len(train.documents), len(validation.ids), len(validation.documents)]
    check(made == counts, f"{name}: tokens and documents are {made}, expected {counts}", out.text)
    place.go(name).expect(DONE)
    same(place.hashes(name), hashes, name + ": batch hashes")


def test_golden_pool(): golden_run("pool")
def test_golden_mixed(): golden_run("mixed")
def test_golden_repeated(): golden_run("repeated")
def test_golden_staged(): golden_run("staged")
def test_golden_masked(): golden_run("masked")
def test_golden_unshuffled(): golden_run("unshuffled")


# ---- the same documents in other trainers' files ----------------------------------


def kept():
    """Documents of both sources as prepare keeps them: distinct but for case and white space."""
    seen, out = set(), [[], []]
    for source, documents in enumerate(data_run_cases.sources()):
        for d in documents:
            normal = b" ".join(d.lower().split())
            if normal not in seen:
                seen.add(normal)
                out[source].append(encode(d))
    return out


def write_all(folder, fmt):
    """Both sources in one trainer's files; returns the sources' entries beyond the path."""
    for source, documents in zip(("alpha", "beta"), kept()):
        at = place.at(folder, source)
        os.makedirs(at)
        half = len(documents) // 2
        if fmt.startswith("megatron"):
            size = 2 if fmt.endswith("u16") else 4
            token_files.write_megatron(at + "/0", documents[:half], size)
            token_files.write_megatron(at + "/1", documents[half:], size)
        elif fmt.startswith("llmc"):
            token_files.write_llmc(at + "/a_000.bin", documents[:half], 2 if fmt.endswith("u16") else 4)
            token_files.write_llmc(at + "/a_001.bin", documents[half:], 2 if fmt.endswith("u16") else 4)
        elif fmt == "titan":
            token_files.write_titan(at + "/tokens.bin", at + "/tokens.offsets.npy", documents)
        elif fmt == "npy":
            token_files.write_npy(at + "/tokens.npy", sum(documents, []), "<u2")
        else:
            token_files.write_raw(at + "/0.bin", documents[:half], 2 if fmt == "raw-u16" else 4)
            token_files.write_raw(at + "/1.bin", documents[half:], 2 if fmt == "raw-u16" else 4)
    return {"megatron-i32": {"format": "megatron"}, "megatron-u16": {}, "llmc-u16": {"bos": BOS}, "llmc-u32": {"format": "llmc", "eos": EOS},
            "titan": {"format": "raw-u32"}, "npy": {"format": "npy", "bos": BOS, "eos": EOS}, "raw-u16": {"format": "raw-u16", "bos": BOS, "eos": EOS},
            "raw-u32": {"format": "raw-u32", "eos": EOS}}[fmt]


def other_files(fmt, name="mixed"):
    """Sample for sample what prepare makes of the same documents: the golden batches."""
    case, (counts, hashes) = CASES[name], golden()[name]
    more = write_all(fmt, fmt)
    label = f"{name}-{fmt}"
    config = place.config(label, source_entries(case, (f"{fmt}/alpha", f"{fmt}/beta"), **more), "index",
                          **{**settings_of(case), "data.validation": label + ".validation.index"})
    place.command("index", config).expect(DONE, rf"{label}\.index: {counts[0]} tokens in {counts[1]} documents",
                                          rf"{label}\.validation\.index: {counts[2]} tokens in {counts[3]} documents")
    place.go(label).expect(DONE, r"index reused")
    same(place.hashes(label), hashes, f"{label}: batch hashes")


def test_files_megatron(): other_files("megatron-i32")
def test_files_megatron_u16(): other_files("megatron-u16")
def test_files_llmc(): other_files("llmc-u16")
def test_files_llmc_u32(): other_files("llmc-u32", "repeated")
def test_files_titan(): other_files("titan", "pool")
def test_files_npy(): other_files("npy")
def test_files_raw_u16(): other_files("raw-u16", "staged")
def test_files_raw_u32(): other_files("raw-u32", "masked")


# ---- resumes across files, epochs and worlds ---------------------------------------


def shards(folder, files, seed=5, documents=12):
    """Megatron files, and their documents in order."""
    os.makedirs(place.at(folder), exist_ok=True)
    everything = []
    for i in range(files):
        made = [encode(d) for d in corpus(seed + i, documents)]
        token_files.write_megatron(place.at(folder, f"{i:03d}"), made)
        everything += made
    return everything


def in_files(name, folder, **settings):
    """A run over a folder's shards in their order."""
    return place.config(name, [folder], "index", **{"data.shuffle_documents": False, **settings})


def test_resume_across_files_and_epochs():
    """1.4 epochs over three files, stopped in the second file and after 1.2 epochs: as if never stopped."""
    documents = shards("three", 3)
    tokens = sum(map(len, documents))
    epoch = (tokens - 1) // SEQ_LEN / GLOBAL_BATCH
    first_file = sum(map(len, documents[:12])) / SEQ_LEN / GLOBAL_BATCH
    second_file = sum(map(len, documents[:24])) / SEQ_LEN / GLOBAL_BATCH
    stops, updates = [round((first_file + second_file) / 2), round(1.2 * epoch)], round(1.4 * epoch)
    check(first_file + 1 < stops[0] < second_file - 1 and epoch < stops[1] < updates, "where the stops are")
    in_files("across", "three", **{"train.updates": updates})
    place.go("across", "whole").expect(DONE, rf"\b{tokens} tokens, {(tokens - 1) // SEQ_LEN} samples an epoch")
    for np in (0, 2):
        name = f"stopped-{np}"
        for k, stop in enumerate(stops):
            place.go("across", name, np, run__stop_after_update=stop).expect(PREEMPTED)
            meta = place.meta(name, stop)
            check(meta["samples"] == GLOBAL_BATCH * stop and meta["train_digest"] == place.digest("whole"), "where the checkpoint stands", str(meta))
        place.go("across", name, np).expect(DONE, rf"resumed from .*step-{stops[1]:08d} at update {stops[1]}")
        check(place.hashes(name) == place.hashes("whole"), f"{np}: the same samples")
    same(place.updates("stopped-0"), place.updates("whole"), "never stopped")
    check(len(set(place.hashes("whole"))) == updates, "every batch is another")


def test_world_doubled():
    """Saved by two ranks, continued by four: global samples keep their order."""
    if not os.path.exists(place.at("three")):
        shards("three", 3)
    in_files("doubled", "three", **{"train.updates": 14})
    place.go("doubled", "doubled-whole", 2).expect(DONE)
    place.go("doubled", "doubled", 2, run__stop_after_update=6).expect(PREEMPTED)
    place.go("doubled", "doubled", 4).expect(DONE, r"at update 6\n")
    same(place.hashes("doubled"), place.hashes("doubled-whole"), "batch hashes")
    check([r["samples"] for r in place.lines("doubled", "update")] == [GLOBAL_BATCH * (i + 1) for i in range(14)], "samples")


def test_appended_shard():
    """A shard more is another dataset: refused with both digests, then allowed by name."""
    shards("grows", 2)
    config = in_files("grows", "grows", **{"train.updates": 10})
    place.go("grows", run__stop_after_update=4).expect(PREEMPTED)
    was = place.digest("grows")
    more = [encode(d) for d in corpus(99, 5)]
    token_files.write_megatron(place.at("grows", "002"), more)
    place.command("index", config, "--force").expect(DONE)
    out = place.go("grows").expect(DATA, r"not the one this run read", r"data\.allow_change|allow-data-change")
    digests = set(re.findall(r"\b[0-9a-f]{32}\b", out.text.split("not the one this run read")[1]))
    check(was in digests and len(digests) == 2, "both digests", out.text)
    check(place.column("grows", "update") == [1, 2, 3, 4], "a refused start leaves the records alone")
    place.command("train", config, "--allow-data-change").expect(DONE, rf"digest {was} -> [0-9a-f]{{32}}")
    check(place.column("grows", "update") == list(range(1, 11)), "goes on")


def test_changed_shard():
    """The same size, other ids: seen without being told."""
    shards("edited", 2)
    config = in_files("edited", "edited", **{"train.updates": 200, "validation.every": 0})
    place.command("index", config).expect(DONE)
    with open(place.at("edited", "001.bin"), "r+b") as f:
        f.seek(400)
        byte = f.read(1)
        f.seek(400)
        f.write(bytes([byte[0] ^ 1]))
    place.go("edited").expect(DATA, r"edited/001\.bin", r"digest|checksum")


# ---- indexes ----------------------------------------------------------------------


def test_index_reused():
    """Made once on any machine; what starts later only reads it."""
    shards("once", 2)
    config = in_files("once", "once", **{"train.updates": 2})
    place.command("index", config).expect(DONE)
    before = os.stat(place.at("once.index"))
    place.command("index", config).expect(DONE, r"index reused")
    for np in (0, 2):
        place.go("once", f"once-{np}", np).expect(DONE, r"index reused")
    after = os.stat(place.at("once.index"))
    check((before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino), "the index was left alone")
    place.command("inspect", "once.index", "--verify").expect(DONE)


def test_two_jobs_on_an_empty_cache():
    shards("race", 4, documents=30)
    config = in_files("race", "race", **{"train.updates": 3})
    for attempt in range(3):
        if os.path.exists(place.at("race.index")):
            os.remove(place.at("race.index"))
        jobs = [place.start("train", config, *words({"run.folder": f"race-{attempt}-{k}"}), np=np) for k, np in enumerate((0, 2, 0))]
        jobs.append(place.start("index", config))
        for job in jobs:
            job.end().expect(DONE)
        check(len({tuple(place.hashes(f"race-{attempt}-{k}")) for k in range(3)}) == 1, "one order")
        left = [n for n in os.listdir(place.path) if n.startswith("race.index") and n != "race.index"]
        check(not left, "nothing is left beside the index", str(left))


def test_ranks_with_their_own_temporary_folders():
    shards("apart", 2)
    config = in_files("apart", "apart", **{"train.updates": 3})
    os.makedirs(place.at("tmp-0"))
    os.makedirs(place.at("tmp-1"))
    rank = [place.program, "train", config]
    environment = [["env", "TMPDIR=" + place.at(f"tmp-{i}")] for i in range(2)]
    Job(["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "1", *environment[0], *rank, ":", "-np", "1", *environment[1], *rank],
        place.path).end().expect(DONE)
    place.go("apart", "together").expect(DONE, r"index reused")
    same(place.hashes("apart"), place.hashes("together"), "batch hashes")


# ---- sizes ------------------------------------------------------------------------


def sparse(path, tokens, ids=()):
    """u16 zeros but for (token, id)."""
    with open(path, "wb") as f:
        f.truncate(2 * tokens)
        for token, value in ids:
            f.seek(2 * token)
            f.write(value.to_bytes(2, "little"))


def test_three_hundred_shards_of_five_gigabytes():
    """A 5 GiB shard and 299 others: totals beyond 2^31; sample 10^9 and the shard's last from the right bytes, and
    a resume there, at once."""
    tokens, sample, planted = 5 * 2**29, 10**9, (77, 88, 99)
    last = (tokens - 3) // 2
    os.makedirs(place.at("many"))
    sparse(place.at("many", "000.bin"), tokens, [(2 * s + k, i) for s in (sample, last) for k, i in enumerate(planted)])
    for i in range(1, 300):
        sparse(place.at("many", f"{i:03d}.bin"), 1000 + i)
    total = tokens + sum(1000 + i for i in range(1, 300))
    settings = {"data.shuffle_documents": False, "train.seq_len": 2, "train.global_batch": 1, "train.updates": 2}
    config = place.config("many", [{"path": "many", "format": "raw-u16"}], "index", **settings)
    place.command("index", config).expect(DONE, rf" {total} tokens in 300 documents")
    # A corpus of one sample has it at every index.
    token_files.write_raw(place.at("one-sample.bin"), [planted])
    place.config("few", [{"path": "one-sample.bin", "format": "raw-u16"}], "index", **settings)
    for at in (sample, last):
        name, more = f"many-{at}", {"data.skip": f"0-{at - 1}"}
        began = processor_seconds()
        place.go("many", name, run__stop_after_update=1, **more).expect(
            PREEMPTED, rf" {total} tokens, {(total - 1) // 2} samples an epoch and 1 tokens over")
        place.go("many", name, **more).expect(DONE, r"at update 1\n")
        spent = processor_seconds() - began
        began = processor_seconds()
        place.go("few", f"few-{at}", train__updates=1, **more).expect(DONE)
        least = processor_seconds() - began
        check(spent < 4 * least + 2, f"sample {at}: nothing before it is read: {spent:.2f} s of a processor, of a corpus of one sample {least:.2f} s")
        same(place.hashes(name)[:1], place.hashes(f"few-{at}"), f"sample {at}")
    shutil.rmtree(place.at("many"))


def test_short_shard():
    token_files.write_raw(place.at("short.bin"), [[1] * 10])
    place.config("short", [{"path": "short.bin", "format": "raw-u16"}], "index")
    out = place.go("short").expect(DATA, r"short", rf"\b{SEQ_LEN + 1}\b", r"\b10\b")
    check(len(re.findall(r"error:", out.text)) == 1, "one error", out.text)


def test_id_above_the_vocabulary():
    documents = [encode(d) for d in corpus(3, 20)]
    documents[7][3] = VOCAB
    at = sum(map(len, documents[:7])) + 3
    os.makedirs(place.at("above"))
    token_files.write_megatron(place.at("above", "0"), documents)
    in_files("above", "above", **{"train.updates": 100})
    for np in (0, 2):
        place.go("above", f"above-{np}", np).expect(DATA, r"above/0\.bin", rf"\b{VOCAB}\b", rf"\b{4 * at}\b")


# ---- documents' ends ----------------------------------------------------------------


def packed(name, tokenizer, bos, eos):
    """Three documents' ids in the stream that prepare packs, and the stream."""
    documents = [b"first", b"second one", b"third"]
    if not os.path.exists(place.at("three-texts")):
        token_files.write_texts(place.at("three-texts"), documents)
    config = place.config(name, ["three-texts"], **{"data.tokenizer": tokenizer, "data.bos": bos, "data.eos": eos})
    place.command("prepare", config).expect(DONE)
    made = Stream(place.at(name + ".train"))
    check(len(made.documents) == 3, name + ": three documents")
    return sorted(made.documents), made, documents


def test_separators():
    """Every setting, every kind of tokenizer: a BOS and an EOS where asked for, no other, none twice."""
    token_files.write_rank_file(place.at("ranks.model"))
    token_files.write_tokenizer_json(place.at("tokenizer.json"), ["<|begin_of_text|>", "<|end_of_text|>"])
    for k, tokenizer in enumerate(("bytes", "ranks.model", "tokenizer.json")):
        for bos in (True, False):
            for eos in (True, False):
                name = f"packed-{k}-{int(bos)}{int(eos)}"
                ids, made, documents = packed(name, tokenizer, bos, eos)
                same(ids, sorted(encode(d, bos, eos) for d in documents), name)
                check(made.ids.count(BOS) == 3 * bos and made.ids.count(EOS) == 3 * eos, name + ": counts")
                check((made.bos, made.eos) == (BOS if bos else -1, EOS if eos else -1), f"{name}: header says {made.bos}, {made.eos}")


def test_one_token_for_both():
    """GPT-2's <|endoftext|> begins and ends: one stands between documents, not two."""
    token_files.write_tokenizer_json(place.at("gpt2.json"), ["<|endoftext|>"])
    for bos, eos in ((True, True), (False, True), (True, False)):
        name = f"one-{int(bos)}{int(eos)}"
        ids, made, documents = packed(name, "gpt2.json", bos, eos)
        check(made.ids.count(256) == 3, f"{name}: {made.ids.count(256)} separators of 3 documents")
        check(all(d.count(256) == 1 and (d[0] == 256) != (d[-1] == 256) for d in made.documents), name + ": one in each")
    _, made, _ = packed("one-00", "gpt2.json", False, False)
    check(256 not in made.ids, "none")


def test_invalid_text_by_policy():
    """Bytes and escapes that are no text: refused by file and line, dropped or replaced, and counted."""
    os.makedirs(place.at("odd"))
    with open(place.at("odd", "a.jsonl"), "wb") as f:
        f.write(b'{"text": "first"}\n{"text": "half \\ud800 pair"}\n{"text": "whole \\ud83d\\ude42"}\n{"text": "byte \xff here"}\n')
    token_files.write_tokenizer_json(place.at("gpt2.json"), ["<|endoftext|>"])
    config = place.config("odd-text", ["odd"], **{"data.tokenizer": "gpt2.json", "data.shuffle_documents": False, "data.bos": False})
    for first, pattern in (("half", r"odd/a\.jsonl:2: .*surrogate pair \(data\.invalid_utf8"), ("byte", r"odd/a\.jsonl:3: .*UTF-8 \(byte 5 of the text\)")):
        place.command("prepare", config, "--set", "data.invalid_utf8=error").expect(DATA, pattern)
        with open(place.at("odd", "a.jsonl"), "rb") as f:
            lines = f.read().splitlines(True)
        if first == "half":
            with open(place.at("odd", "a.jsonl"), "wb") as f:
                f.writelines(lines[:1] + lines[2:])
    with open(place.at("odd", "a.jsonl"), "ab") as f:
        f.write(b'{"text": "half \\ud800 pair"}\n')
    for policy, texts in (("drop", ["first", "whole \U0001f642"]), ("replace", ["first", "whole \U0001f642", "byte \ufffd here", "half \ufffd pair"])):
        place.command("prepare", config, "--force", "--set", "data.invalid_utf8=" + policy).expect(DONE)
        made = Stream(place.at("odd-text.train")).documents
        same([bytes(d[:-1]).decode() for d in made], texts, policy)


def test_tokenizer_and_vocabulary():
    """A vocabulary that the model lacks is refused before the work; a stream of another tokenizer is told."""
    if not os.path.exists(place.at("three-texts")):
        token_files.write_texts(place.at("three-texts"), [b"first", b"second one", b"third"])
    token_files.write_tokenizer_json(place.at("wide.json"), [f"<|{i}|>" for i in range(9)])
    config = place.config("wide", ["three-texts"], **{"data.tokenizer": "wide.json"})
    place.command("prepare", config).expect(CONFIG, r"vocab_size: 258 is less than the 265 ids of data\.tokenizer wide\.json")
    check(not os.path.exists(place.at("wide.train")), "nothing was made")
    token_files.write_tokenizer_json(place.at("gpt2.json"), ["<|endoftext|>"])
    config = place.config("told", ["three-texts"], **{"data.tokenizer": "gpt2.json", "train.seq_len": 4, "train.updates": 1})
    place.command("prepare", config).expect(DONE)
    out = place.go("told").expect(DONE)
    check("tokenizer" not in out.text, "nothing to tell", out.text)
    for name, pattern in (("bytes", r"made with tokenizer gpt2-\w+, data\.tokenizer is bytes"), ("gone.json", r"made with tokenizer gpt2-\w+, .*gone\.json")):
        place.go("told", "told-" + name, data__tokenizer=name).expect(DONE, pattern)
    token_files.write_raw(place.at("marks.bin"), [[1] * 99])
    for mark in ("bos", "eos"):
        config = place.config("marks", [{"path": "marks.bin", "format": "raw-u16", mark: VOCAB}], "index")
        place.command("index", config).expect(CONFIG, rf"{mark} {VOCAB} is no id")


# ---- nothing is dropped in silence ---------------------------------------------------


def test_dropped_tokens_add_up():
    """What prepare and index leave out, by source, and what no sample reads."""
    case = {**CASES["mixed"], "weights": [1, 9]}
    documents = kept()
    sums = [sum(map(len, d)) for d in documents]
    for source, texts in zip(("alpha", "beta"), data_run_cases.sources()):
        if not os.path.exists(place.at("left", source)):
            token_files.write_texts(place.at("left", source), texts)
    more = write_all("left-megatron", "megatron-i32")
    settings = {**settings_of(case), "data.validation_fraction": 0}
    config = place.config("left", source_entries(case, ("left/alpha", "left/beta")), **settings)
    out = place.command("prepare", config).expect(DONE)
    used = {name: int(tokens) for name, _, tokens in Stream(place.at("left.train")).sources}
    for name, whole in zip(("alpha", "beta"), sums):
        line = re.search(rf"^ *{name} +\d+ +(\d+) .* (\d+)$", out.text.split("unused tokens\n")[1], re.MULTILINE)
        check(line and int(line[1]) == used[name] and int(line[1]) + int(line[2]) == whole, f"prepare: {name} of {whole}", out.text)
    config = place.config("left-index", source_entries(case, ("left-megatron/alpha", "left-megatron/beta"), **more), "index", **settings)
    out = place.command("index", config).expect(DONE, rf" {sum(used.values())} tokens in \d+ documents")
    unused = {name: int(n) for n, name in re.findall(r"(\d+) tokens of source (\w+) are not used", out.text)}
    for name, whole in zip(("alpha", "beta"), sums):
        check(used[name] + unused.get(name, 0) == whole, f"index: {name} of {whole}", out.text)
    check(unused, "something is left over")
    for name in ("left", "left-index"):
        out = place.command("check", name + ".yaml").expect(DONE)
        found = re.search(r"(\d+) tokens, (\d+) samples of (\d+) and (\d+) tokens over", out.text)
        check(found, "check says what is left over", out.text)
        total, samples, seq_len, over = map(int, found.groups())
        check(total == sum(used.values()) == samples * seq_len + 1 + over and over < seq_len, "the sum", out.text)
        place.go(name, train__updates=1).expect(DONE, rf" {total} tokens, {samples} samples an epoch and {over} tokens over")


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
