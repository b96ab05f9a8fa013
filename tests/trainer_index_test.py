#!/usr/bin/env python3
"""Training on token files that others made: `fp4d index`, indexes that train builds, the same samples as
from a prepared stream, resume, samples left out, changed files, and files of many GiB.

    BUILD=build python3 tests/trainer_index_test.py [NAME...]
"""
import glob
import json
import os
import re
import shutil
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fp4d import CONFIG, CONFIG_BASE, DATA, DONE, PREEMPTED, Place, check, main, processor_seconds, same, write_config  # noqa: E402

BOS, EOS = 256, 257
place = Place(files=2)

# ---- files as the tools write them ------------------------------------------


def save(path, *parts):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        for part in parts:
            f.write(part)


def ids(documents, code):
    flat = [i for d in documents for i in d]
    return struct.pack(f"<{len(flat)}{code}", *flat)


def megatron(name, documents, code="i"):
    width, number = struct.calcsize(code), {"B": 1, "h": 3, "i": 4, "q": 5, "H": 8}[code]
    lengths = [len(d) for d in documents]
    starts = [sum(lengths[:k]) * width for k in range(len(lengths))]
    n = len(documents)
    save(name + ".bin", ids(documents, code))
    save(name + ".idx", b"MMIDIDX\0\0", struct.pack("<QBQQ", 1, number, n, n + 1), struct.pack(f"<{n}i", *lengths),
         struct.pack(f"<{n}q", *starts), struct.pack(f"<{n + 1}q", *range(n + 1)))


def llmc(name, documents, llama):
    tokens = sum(map(len, documents))
    head = struct.pack("<256i", *((20240801, 7) if llama else (20240520, 1)), tokens, *[0] * 253)
    save(name + ".bin", head, ids(documents, "I" if llama else "H"))


def npy(path, descr, numbers, code):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({len(numbers)},), }}"
    text += " " * ((64 - (10 + len(text) + 1) % 64) % 64) + "\n"
    save(path, b"\x93NUMPY\1\0", struct.pack("<H", len(text)), text.encode(), struct.pack(f"<{len(numbers)}{code}", *numbers))


def offsets(documents):
    out = [0]
    for d in documents:
        out.append(out[-1] + len(d))
    return out


def documents_of(folder):
    out = []
    for path in sorted(glob.glob(os.path.join(folder, "*.txt"))):
        with open(path, "rb") as f:
            out.append([BOS, *f.read(), EOS])
    return out


def flat(documents):
    return [i for d in documents for i in d]


def write_form(form, name, documents):
    """The same documents in one of the formats; what to say of the source."""
    if form == "megatron-i32":
        for k in range(4):
            megatron(f"{name}/shard-{k}", documents[k::4] or documents[:1], "i")
        return {"path": name}
    if form == "megatron-u16":
        megatron(name, documents, "H")
        return {"path": name + ".idx"}
    if form == "llmc-gpt2":
        llmc(name, documents, False)
        return {"path": name + ".bin", "bos": BOS}
    if form == "llmc-llama3":
        llmc(name, documents, True)
        return {"path": name + ".bin", "eos": EOS}
    if form == "olmo":
        for k in range(3):
            save(f"{name}/part-{k}.npy", ids(documents[k::3], "I"))
        return {"path": name, "format": "raw-u32", "eos": EOS}
    if form == "nanogpt":
        save(name + ".bin", ids(documents, "H"))
        return {"path": name + ".bin", "format": "raw-u16", "bos": BOS, "eos": EOS}
    if form == "torchtitan":
        save(f"{name}/tokens.bin", ids(documents, "I"))
        npy(f"{name}/offsets.npy", "<i8", offsets(documents), "q")
        return {"path": name, "format": "raw-u32"}
    npy(name + ".npy", "<i4", flat(documents), "i")
    return {"path": name + ".npy", "bos": BOS}


FORMS = ("megatron-i32", "megatron-u16", "llmc-gpt2", "llmc-llama3", "olmo", "nanogpt", "torchtitan", "npy")

# ---- corpora and configurations ---------------------------------------------


def text(seed, bytes_):
    """Words, different in every document."""
    out, state = bytearray(), seed * 2654435761 % 2**32 or 1
    while len(out) < bytes_:
        state = (state * 1103515245 + 12345) % 2**31
        out += b"%x " % (state >> 9)
    return bytes(out[:bytes_])


def corpora():
    for k in range(60):
        save(place.at("a", f"{k:02d}.txt"), text(k + 1, 90 + 37 * k % 400))
    for k in range(40):
        save(place.at("b", f"{k:02d}.txt"), text(k + 1000, 60 + 53 * k % 300))


def config(name, settings):
    write_config(place.at(name), {**CONFIG_BASE, **settings})
    return name


def mixed(sources, **more):
    """82/18 of two sources."""
    for source, weight, name in zip(sources, (0.82, 0.18), ("a", "b")):
        source.update(weight=weight, name=name)
    return {"data.sources": sources, "data.validation_fraction": 0.2, "data.dedup": "none", "data.seed": 3, **more}


def index_config(name, settings, **more):
    return config(f"{name}.yaml", {**settings, "data.train": f"{name}.index", "data.validation": f"{name}-v.index", "run.folder": f"run-{name}",
                                   "validation.samples": 4, **more})


def train(name, *more, np=0, code=DONE):
    return place.command("train", f"{name}.yaml", *more, np=np).expect(code)


def hashes(name):
    return [u["batch_hash"] for u in place.updates(name)]


def digest(path):
    return re.search(r"digest +([0-9a-f]{32})", place.command("inspect", path).expect(DONE).text).group(1)


corpora()
A, B = documents_of(place.at("a")), documents_of(place.at("b"))

# ---- the same samples --------------------------------------------------------


def test_same_samples_as_a_prepared_stream():
    settings = mixed([{"path": "a"}, {"path": "b"}])
    config("text.yaml", {**settings, "data.train": "text.tokens", "data.validation": "text-v.tokens", "run.folder": "run-text", "train.updates": 40})
    place.command("prepare", "text.yaml", "--force").expect(DONE)
    train("text")
    seen = set()
    for form in FORMS:
        sources = [write_form(form, place.at("files", form + "-" + n), d) for n, d in (("a", A), ("b", B))]
        name = "same-" + form
        index_config(name, mixed(sources), **{"train.updates": 40 if form == "megatron-i32" else 10})
        train(name).expect(DONE, "index built in")
        updates = place.updates("run-" + name)
        if form == "megatron-i32": # 3 epochs
            same(updates, place.updates("run-text"), "updates of text and Megatron files")
        else:
            check([u["batch_hash"] for u in updates] == [u["batch_hash"] for u in place.updates("run-text")[:10]], "batches of " + form)
        seen.add((digest(f"{name}.index"), digest(f"{name}-v.index")))
    check(len(seen) == 1, f"digests of all formats are one: {seen}")
    shares = place.command("inspect", "same-olmo.index").expect(DONE).text
    check(float(re.search(r"a: \d+ documents, \d+ tokens \(([0-9.]+) %\)", shares).group(1)) > 80, "the share of a", shares)


def test_repetition_stages_and_pool_as_prepared():
    """Passes over a source, weights that change, a target of tokens, no weights, no shuffling."""
    variants = {
        "repeat": mixed([{"path": "a", "max_repetition": 1.7}, {"path": "b", "max_repetition": 3}], **{"data.seed": 11}),
        "target": mixed([{"path": "a", "max_repetition": 4}, {"path": "b", "max_repetition": 4}], **{"data.tokens": 30000}),
        "pool": {"data.sources": [{"path": "a"}, {"path": "b"}], "data.validation_fraction": 0.2, "data.dedup": "none", "data.seed": 5},
        "stages": {"data.sources": [{"path": "a"}, {"path": "b", "max_repetition": 5}], "data.validation_fraction": 0.2, "data.dedup": "none", "data.seed": 5,
                   "data.stages": [{"at": 0, "weights": [0.9, 0.1]}, {"at": 5000, "weights": [0.2, 0.8]}, {"at": 9000, "weights": [0, 1]}]},
        "plain": mixed([{"path": "a"}, {"path": "b"}], **{"data.shuffle_documents": False}),
    }
    for number, (name, settings) in enumerate(variants.items()):
        more = {"validation.samples": 4, "train.updates": 30}
        config(f"{name}-text.yaml", {**settings, **more, "data.train": f"{name}.tokens", "data.validation": f"{name}-v.tokens", "run.folder": f"run-{name}-text"})
        place.command("prepare", f"{name}-text.yaml", "--force").expect(DONE)
        train(f"{name}-text")
        form = FORMS[number + 1]
        sources = [{**source, **write_form(form, place.at("files", f"{name}-{n}"), d)} for source, n, d in zip(settings["data.sources"], ("a", "b"), (A, B))]
        for source, n in zip(sources, ("a", "b")):
            source["name"] = n
        if name == "plain":
            sources[0] = {**settings["data.sources"][0], **write_form("nanogpt", place.at("files", "plain-a"), A)}
            sources[1] = {**settings["data.sources"][1], **write_form("npy", place.at("files", "plain-b"), B)}
        index_config(name, {**settings, "data.sources": sources}, **more)
        train(name)
        check(hashes("run-" + name) == hashes(f"run-{name}-text"), f"batches of {name}")
        losses = [[v["loss"] for v in place.lines(run, "validation")] for run in ("run-" + name, f"run-{name}-text")]
        check(losses[0] and losses[0] == losses[1], f"validation of {name}: {losses}")
        tokens = [re.search(r"tokens +(\d+)", place.command("inspect", path).expect(DONE).text).group(1) for path in (f"{name}.index", f"{name}.tokens")]
        check(tokens[0] == tokens[1], f"tokens of {name}: {tokens}")


def test_index_ahead_of_training():
    index_config("ahead", mixed([write_form("nanogpt", place.at("files", "ahead-" + n), d) for n, d in (("a", A), ("b", B))]))
    place.command("check", "ahead.yaml").expect(DONE, r"ahead\.index does not exist: `fp4d index`")
    place.command("index", "ahead.yaml").expect(DONE, "index built in")
    before = os.stat(place.at("ahead.index")).st_ino
    place.command("index", "ahead.yaml").expect(DONE, "index reused")
    train("ahead").expect(DONE, "index reused")
    check(os.stat(place.at("ahead.index")).st_ino == before, "the index is the one made ahead")
    place.command("index", "ahead.yaml", "--force").expect(DONE, "index built in")
    os.remove(place.at("ahead-v.index"))
    place.command("index", "ahead.yaml").expect(DATA, "ahead.index exists and .*ahead-v.index does not .*--force")


def test_export_keeps_every_row():
    """The largest id of the files is not the end of the vocabulary."""
    index_config("rows", mixed([write_form("nanogpt", place.at("files", "rows-" + n), d) for n, d in (("a", A), ("b", B))]),
                 **{"model.vocab_size": 300, "train.updates": 1, "optimizer.warmup_updates": 1})
    train("rows")
    place.command("export", "run-rows", "rows-hf").expect(DONE)
    with open(place.at("rows-hf", "config.json")) as f:
        c = json.load(f)
    check(c["vocab_size"] == 300 and c["eos_token_id"] == EOS, str(c))


def test_refusals():
    index_config("text-source", mixed([{"path": "a"}, {"path": "b"}]))
    place.command("index", "text-source.yaml").expect(CONFIG, "data.sources: a is not known to hold token files .*prepare")
    train("text-source", code=CONFIG)
    config("no-index.yaml", {**mixed([{"path": "a"}]), "data.train": "x.tokens"})
    place.command("index", "no-index.yaml").expect(CONFIG, r"NAME\.index")
    config("mixed-kinds.yaml", {**mixed([write_form("npy", place.at("files", "kinds"), A)]), "data.train": "x.index", "data.validation": "x.tokens"})
    place.command("index", "mixed-kinds.yaml").expect(CONFIG, "data.validation, x.tokens, is none")
    index_config("absent", mixed([{"path": "nowhere/*.bin"}]))
    place.command("index", "absent.yaml").expect(DATA, "no token files in the source nowhere")
    save(place.at("files", "ten.bin"), struct.pack("<10H", *range(10)))
    config("ten.yaml", {"data.sources": [{"path": "files/ten.bin", "format": "raw-u16"}], "data.train": "ten.index", "data.validation": "", "run.folder": "run-ten"})
    train("ten", code=DATA).expect(DATA, r"files/ten\.bin: a sample needs 65 tokens \(seq_len \+ 1\), the file has 10")
    save(place.at("files", "planted.bin"), struct.pack("<200H", *[5] * 123, 258, *[5] * 76))
    config("planted.yaml", {"data.sources": [{"path": "files/planted.bin", "format": "raw-u16"}], "data.train": "planted.index", "data.validation": ""})
    train("planted", code=DATA).expect(DATA, r"files/planted\.bin: token 123 \(byte 246\) is id 258, the vocabulary has 258")


# ---- worlds and races -----------------------------------------------------------


def test_two_jobs_and_two_ranks_at_once():
    sources = [write_form("llmc-llama3", place.at("files", "race-" + n), d) for n, d in (("a", A), ("b", B))]
    for k in range(3):
        for path in glob.glob(place.at("race*.index")):
            os.remove(path)
        jobs = []
        for job in ("x", "y"):
            index_config("race", mixed(sources))
            jobs.append(place.start("train", "race.yaml", "--set", f"run.folder=run-race-{job}{k}", np=2))
        for job in jobs:
            job.end().expect(DONE, "index (built|reused)")
        same(place.updates(f"run-race-x{k}"), place.updates(f"run-race-y{k}"), "two jobs")
        check(not glob.glob(place.at("*.index.tmp*")), "no temporary files are left")


# ---- resume ------------------------------------------------------------------------


def test_resume_in_every_shard_and_epoch():
    sources = [write_form("megatron-i32", place.at("files", "resume-" + n), d) for n, d in (("a", A), ("b", B))]
    settings = mixed(sources)
    index_config("whole", settings, **{"train.updates": 42})
    train("whole")
    samples = int(re.search(r"(\d+) samples an epoch", place.command("train", "whole.yaml", "--set", "run.folder=run-look", "--set", "train.updates=3").expect(DONE).text).group(1))
    check(42 * 8 > 1.4 * samples, f"{samples} samples an epoch: more than one epoch is read")
    for stops in ((3,), (11, 12), (17, 30, 39)): # several resumes
        name = f"cut{stops[0]}"
        settings_cut = {**mixed([dict(s) for s in sources]), "data.train": "whole.index", "data.validation": "whole-v.index", "run.folder": "run-" + name,
                        "validation.samples": 4, "train.updates": 42}
        config(name + ".yaml", settings_cut)
        for stop in stops:
            train(name, "--set", f"run.stop_after_update={stop}", code=PREEMPTED)
            check(place.meta("run-" + name, stop)["samples"] == 8 * stop, "where the run stands")
        train(name, np=2 if stops[0] == 11 else 0)
        one, other = place.updates("run-" + name), place.updates("run-whole")
        if stops[0] == 11: # another world: the same batches
            check([u["batch_hash"] for u in one] == [u["batch_hash"] for u in other], "batches of two ranks")
        else:
            same(one, other, "a run that was stopped and one that was not")
        check([u["tokens"] for u in one] == [64 * 8 * (k + 1) for k in range(42)], "tokens are counted exactly")


def test_samples_left_out():
    sources = [write_form("torchtitan", place.at("files", "skip-" + n), d) for n, d in (("a", A), ("b", B))]
    settings = mixed(sources, **{"train.updates": 12, "train.global_batch": 8})
    index_config("skip", settings)
    train("skip")
    plain = hashes("run-skip")

    def variant(name, skip, **more):
        config(name + ".yaml", {**CONFIG_BASE, **mixed([dict(s) for s in sources]), "data.train": "skip.index", "data.validation": "skip-v.index",
                                "run.folder": "run-" + name, "validation.samples": 4, "train.updates": 12, "data.skip": skip, **more})

    # 16 samples that begin update 3 are left out: a run of 12 updates reads what one without reads in the first 2 and 4 to 14 less.
    variant("skip-in", ["16-31"])
    train("skip-in")
    check(hashes("run-skip-in")[:2] == plain[:2] and hashes("run-skip-in")[2] != plain[2], "the first updates are as without")
    check(place.meta("run-skip-in", 12)["samples"] == 12 * 8 + 16, "the state is an index of the order")
    # The same range, made known at a resume before it, gives the same run.
    variant("skip-late", [])
    train("skip-late", "--set", "run.stop_after_update=2", code=PREEMPTED)
    variant("skip-late", ["16-31"])
    train("skip-late")
    same(place.updates("run-skip-late"), place.updates("run-skip-in"), "a range left out from the start and from a resume on")
    # A range that was read before a resume moves nothing.
    variant("skip-past", [])
    train("skip-past", "--set", "run.stop_after_update=5", code=PREEMPTED)
    check(place.meta("run-skip-past", 5)["samples"] == 40, "where it stands")
    variant("skip-past", ["0-15", "20-39"])
    train("skip-past")
    check(place.meta("run-skip-past", 12)["samples"] == 96, "where it ends")
    check([u["loss"] for u in place.updates("run-skip-past")] == [u["loss"] for u in place.updates("run-skip")], "losses are those of the run without")


def test_first_epoch_shuffled():
    sources = [write_form("npy", place.at("files", "shuffle-" + n), d) for n, d in (("a", A), ("b", B))]
    index_config("shuffle", mixed(sources))
    train("shuffle")
    train("shuffle", "--set", "data.shuffle_samples=true", "--set", "run.folder=run-shuffled")
    check(not set(hashes("run-shuffle")) & set(hashes("run-shuffled")), "another order of samples")
    train("shuffle", "--set", "data.shuffle_samples=true", "--set", "train.updates=13", code=DATA).expect(DATA, "shuffle_samples")


# ---- changed data ----------------------------------------------------------------


def test_changed_data_is_refused():
    sources = [write_form("megatron-i32", place.at("files", "change-" + n), d) for n, d in (("a", A), ("b", B))]
    index_config("change", mixed(sources), **{"train.updates": 20})
    train("change", "--set", "run.stop_after_update=5", code=PREEMPTED)
    old = digest("change.index")
    # A new shard: the index is not of these sources any more.
    megatron(place.at("files", "change-b", "shard-9"), [[BOS, *b"one more document, number %d" % k, EOS] for k in range(20)])
    train("change", code=DATA).expect(DATA, r"change-b/shard-9\.idx is new .*--force")
    place.command("check", "change.yaml").expect(DATA, r"change-b/shard-9\.idx is new .*--force")
    place.command("index", "change.yaml", "--force").expect(DONE)
    new = digest("change.index")
    check(new != old, "another dataset has another digest")
    refused = train("change", code=DATA)
    check(old in refused.text and new in refused.text and "--allow-data-change" in refused.text, "both digests are named", refused.text)
    allowed = train("change", "--allow-data-change")
    check(old in allowed.text and new in allowed.text, "a warning with both", allowed.text)
    check(len(place.updates("run-change")) == 20, "the run went on")
    # Other bytes under the same name and size.
    path = place.at("files", "change-a", "shard-2.bin")
    with open(path, "r+b") as f:
        f.seek(40)
        f.write(b"\1\0\0\0")
    train("change", "--set", "run.folder=run-change-2", code=DATA).expect(DATA, r"shard-2\.bin has changed since it was indexed: bytes 0 to \d+ have digest [0-9a-f]{32}, .* says [0-9a-f]{32}")
    os.remove(path)
    train("change", "--set", "run.folder=run-change-3", code=DATA).expect(DATA, r"shard-2\.bin was indexed by .* and cannot be used now: No such file")


# ---- size ---------------------------------------------------------------------------


def need_space():
    """Sparse files take none; their folder must know them."""
    path = place.at("sparse")
    with open(path, "wb") as f:
        f.truncate(1 << 33)
    small = os.stat(path).st_blocks * 512 < 1 << 20
    os.remove(path)
    check(small, "the temporary folder keeps sparse files")


def tokens_at(path, first, count):
    out = place.command("inspect", path, "--token", str(first)).expect(DONE).text
    return [int(i) for line in re.findall(r"^  [|#] ([0-9 ]+)$", out, re.M) for i in line.split()][:count]


def test_sparse_5_gib_shards():
    need_space()
    size = 5 << 30
    tokens = size // 4
    for form in ("raw", "megatron"):
        os.makedirs(place.at("big"), exist_ok=True)
        path = place.at("big", form + ".bin")
        with open(path, "wb") as f:
            f.truncate(size)
            f.seek((1 << 31) - 8)
            f.write(struct.pack("<4I", 11, 12, 13, 14)) # across 2^31 bytes
            f.seek((1 << 32) - 8)
            f.write(struct.pack("<4I", 21, 22, 23, 24)) # across 2^32
            f.seek(size - 32)
            f.write(struct.pack("<8I", *range(31, 39)))
        source = {"path": path, "format": "raw-u32"}
        if form == "megatron":
            lengths = [tokens // 2, tokens - tokens // 2]
            save(path[:-4] + ".idx", b"MMIDIDX\0\0", struct.pack("<QBQQ", 1, 4, 2, 2), struct.pack("<2i", *lengths),
                 struct.pack("<2q", 0, lengths[0] * 4), struct.pack("<2q", 0, 2))
            source = {"path": path[:-4] + ".idx"}
        config(form + ".yaml", {"data.sources": [source], "data.train": form + ".index", "data.validation": "", "run.threads": 2})
        place.command("index", form + ".yaml").expect(DONE, rf"{tokens} tokens in 1 documents")
        check(tokens_at(form + ".index", tokens - 8, 8) == list(range(31, 39)), "the last tokens")
        where, wanted = ((1 << 29) - 2, [11, 12, 13, 14]) if form == "raw" else ((1 << 30) - 2, [21, 22, 23, 24])
        check(tokens_at(form + ".index", where, 4) == wanted, "across 2^31 and 2^32 bytes")
        os.remove(path)


def test_300_sparse_shards():
    need_space()
    shards, each = 300, 15_000_000
    for k in range(shards):
        name = place.at("many", f"{k:03d}")
        save(name + ".bin")
        with open(name + ".bin", "r+b") as f:
            f.truncate(each)
            f.seek(each - 2)
            f.write(bytes([k % 250, k // 250 + 1]))
        lengths = [50_000] * (each // 50_000)
        n = len(lengths)
        save(name + ".idx", b"MMIDIDX\0\0", struct.pack("<QBQQ", 1, 1, n, n + 1), struct.pack(f"<{n}i", *lengths),
             struct.pack(f"<{n}q", *(50_000 * i for i in range(n))), struct.pack(f"<{n + 1}q", *range(n + 1)))
    config("many.yaml", {"data.sources": [{"path": "many"}], "data.train": "many.index", "data.validation": "", "data.shuffle_documents": False,
                         "train.seq_len": 4, "run.threads": 2, "optimizer.warmup_updates": 0, "train.updates": 1, "train.local_batch": 1, "train.global_batch": 1})
    place.command("index", "many.yaml").expect(DONE, f"{shards} token files", rf"{shards * each} tokens in {shards * 300} documents")
    for k in (7, 299):
        check(tokens_at("many.index", (k + 1) * each - 2, 2) == [k % 250, k // 250 + 1], f"the end of shard {k}")
    spent = []
    for token, wanted in ((0, [0] * 4), (4_000_000_000, [0] * 4)):
        began = processor_seconds()
        check(tokens_at("many.index", token, 4) == wanted, "samples 0 and 10^9 of 4 tokens")
        spent.append(processor_seconds() - began)
    check(spent[1] < 2 * spent[0] + 1, f"sample 10^9 is reached as fast as sample 0: {spent} s of a processor")
    place.command("check", "many.yaml").expect(DONE, f"{shards * each} tokens, {(shards * each - 1) // 4} samples")
    shutil.rmtree(place.at("many"))


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
