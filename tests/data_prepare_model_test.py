#!/usr/bin/env python3
"""`fp4d prepare` against a second implementation of docs/formats.md (tests/oracle/prepare_model.py): the same bytes.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why" for each test; exit status 0
iff all are ok.  Standard library, libxxhash and the zstd program.
"""
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

from fp4d import DATA, DONE, Job, PROGRAM, ROOT, check, main

sys.path.insert(0, os.path.join(ROOT, "tests", "oracle"))
import prepare_model as model  # noqa: E402

ROOM = tempfile.mkdtemp(prefix="fp4d-prepare-")
WORDS = "the of model Token stream  gradient\n\nCafé naïve 数据 поток \U0001f600 zero ONE a\tb and".split(" ")


def text(r, longest):
    return " ".join(r.choice(WORDS) for _ in range(r.randint(0, r.choice([3, 20, longest]))))


def write(name, data):
    path = os.path.join(ROOM, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data)
    return path


def json_line(r, value, key="text"):
    line = json.dumps({"id": r.randrange(99), key: value, "meta": {"a": [1, None, "}"]}}, ensure_ascii=r.random() < 0.5)
    return line.encode("utf-8", "surrogatepass") + r.choice([b"\n", b"\r\n", b"\n\n \t\n"])


def make_corpus(seed, documents=60, longest=200):
    """Two sources: a folder of files of all kinds, and lines under another key in frames of Zstandard."""
    r = random.Random(seed)
    folder = f"corpus-{seed}"
    shutil.rmtree(os.path.join(ROOM, folder), ignore_errors=True)
    texts = [text(r, longest) for _ in range(documents)]
    for i, t in enumerate(texts[:documents // 3]):
        data = t.encode()
        if r.random() < 0.15:
            at = r.randrange(len(data) + 1)
            data = data[:at] + r.choice([b"\xff", b"\xe2\x82", b"\xed\xa0\x80", b"\xc0\xaf\xf0\x9f"]) + data[at:]
        if r.random() < 0.1:
            data = b"\xef\xbb\xbf" + data
        name = f"{folder}/a/{r.choice('xyz')}/{i:03d}" + r.choice([".txt", ".md", ".rst"])
        if r.random() < 0.3:
            write(name + ".gz", gzip.compress(data))
        elif r.random() < 0.3:
            write(name, data)
            subprocess.run(["zstd", "-q", "--rm", os.path.join(ROOM, name)], check=True)
        else:
            write(name, data)
    lines = []
    for t in texts[documents // 3:2 * documents // 3]:
        line = json_line(r, t + r.choice(["", "", "", "\ud83d tail"]))
        lines.append(line.replace(b"tail", b"t\xfeil") if b"\\ud83d" not in line and r.random() < 0.1 else line)
    cut = len(lines) // 2
    write(f"{folder}/a/lines.jsonl.gz", gzip.compress(b"".join(lines[:cut])) + gzip.compress(b"".join(lines[cut:])))
    others = texts[2 * documents // 3:] + [r.choice(texts).upper().replace(" ", "  ") for _ in range(6)]
    frames = b""
    for begin in range(0, len(others), 7):
        part = b"".join(json_line(r, t, "body") for t in others[begin:begin + 7])
        frames += subprocess.run(["zstd", "-qc"], input=part, stdout=subprocess.PIPE, check=True).stdout
    write(f"{folder}/b.jsonl.zst", frames)
    return [{"path": f"{folder}/a", "name": "alpha"}, {"path": f"{folder}/b.jsonl.zst", "name": "beta", "text_key": "body"}]


def settings_line(data):
    """How a stream says that it was made, from the section of the configuration."""
    def values(key, default):
        return ",".join("%.17g" % s.get(key, default) for s in data["sources"])
    boolean = ("false", "true")
    words = [f"seed={data.get('seed', 1)}", f"shuffle_documents={boolean[data.get('shuffle_documents', True)]}", f"tokens={data.get('tokens', 0)}",
             "validation_fraction=%.17g" % data["validation_fraction"], f"bos={boolean[data.get('bos', True)]}",
             f"eos={boolean[data.get('eos', True)]}", f"invalid_utf8={data.get('invalid_utf8', 'replace')}", f"dedup={data.get('dedup', 'exact')}"]
    if data.get("dedup") == "minhash":
        words.append("minhash_threshold=%.17g" % data.get("minhash_threshold", 0.75))
    words += ["weights=" + values("weight", 0), "max_repetition=" + values("max_repetition", 1)]
    for i, stage in enumerate(data.get("stages", ())):
        words.append(f"stage{i + 1}={int(stage['at'])}" + "".join(",%.17g" % w for w in stage["weights"]))
    return " ".join(words)


def section_of(settings, data):
    mapping = {k: v for k, v in settings.items()
               if k in ("sources", "tokens", "seed", "shuffle_documents", "invalid_utf8", "dedup", "validation_fraction", "tokenizer")}
    if "stages" in settings:
        mapping["stages"] = [{"at": at, "weights": weights} for at, weights in settings["stages"]]
    mapping.setdefault("validation_fraction", 0.2)
    mapping.update({"train": "t.tokens", "validation": "v.tokens", "prepare_memory": 16777216, **data})
    return mapping


def run(settings, code=DONE, patterns=(), **data):
    """Runs prepare in ROOM with the settings of the model; the bytes of both streams."""
    threads = data.pop("threads", 2)
    mapping = section_of(settings, data)
    config = {"model": {"preset": "tiny", "vocab_size": max(258, settings.get("vocab", 258))}, "run": {"threads": threads}, "data": mapping}
    with open(os.path.join(ROOM, "run.yaml"), "w") as f:
        json.dump(config, f)  # YAML has JSON in it
    Job([PROGRAM, "prepare", "run.yaml", "--force"], ROOM).end().expect(code, *patterns)
    if code != DONE:
        return None
    out = []
    for name in ("t.tokens", "v.tokens"):
        with open(os.path.join(ROOM, name), "rb") as f:
            out.append(f.read())
    return tuple(out)


def bytes_settings(sources, bos=True, eos=True, **more):
    return {"sources": sources, "before": [256] if bos else [], "after": [257] if eos else [], "bos": 256 if bos else -1,
            "eos": 257 if eos else -1, **more}


def expect_same(settings, what, **data):
    here = os.getcwd()
    os.chdir(ROOM)
    try:
        line = settings_line(section_of(settings, {k: v for k, v in data.items() if k != "threads"}))
        want = model.prepare({**settings, "line": line})
    finally:
        os.chdir(here)
    got = run(settings, **data)
    for side, name in enumerate(("training", "validation")):
        check(got[side] == want[side], f"{what}: the {name} stream has {len(got[side])} bytes, the model's {len(want[side])}" +
              (", other ones" if len(got[side]) == len(want[side]) else ""))
    return got


def test_pool():
    for seed in range(4):
        expect_same(bytes_settings(make_corpus(seed), seed=seed * 7), f"corpus {seed}")


def test_policies():
    for policy in ("replace", "drop"):
        expect_same(bytes_settings(make_corpus(11), invalid_utf8=policy), policy)
    run(bytes_settings(make_corpus(11), invalid_utf8="error"), DATA, [r"corpus-11/a/[^ ]*: .*(no valid UTF-8|surrogate)"])


def test_dedup_and_order():
    sources = make_corpus(12)
    expect_same(bytes_settings(sources, dedup="none"), "no dedup")
    expect_same(bytes_settings(sources, shuffle_documents=False), "in file order")


def weighted(seed, weights, repetitions=(1, 1), **more):
    sources = make_corpus(seed, **more)
    for s, w, m in zip(sources, weights, repetitions):
        s["weight"], s["max_repetition"] = w, m
    return sources


def test_mixtures():
    for weights in ((0.82, 0.18), (1, 3), (0.001, 0.5)):
        expect_same(bytes_settings(weighted(13, weights)), str(weights))
    expect_same(bytes_settings(weighted(13, (0.82, 0.18)), shuffle_documents=False), "in file order")


def test_repetition():
    got = expect_same(bytes_settings(weighted(14, (0.3, 0.7), (1, 5))), "five passes over beta")
    longer = expect_same(bytes_settings(weighted(14, (0.3, 0.7), (2.5, 40))), "40 passes over beta")
    check(len(longer[0]) > len(got[0]), "more passes give a longer stream")
    expect_same(bytes_settings(weighted(14, (0.3, 0.7), (3, 9)), shuffle_documents=False), "passes in file order")
    expect_same(bytes_settings(weighted(14, (0.5, 0.5), (0.3, 0.5))), "parts of a pass")


def test_stages_and_tokens():
    sources = make_corpus(15, 120)
    for s in sources:
        s["max_repetition"] = 6
    stages = [(0, [0.9, 0.1]), (3000, [0.2, 0.8]), (3001, [0, 1]), (9000, [1, 0])]
    expect_same(bytes_settings(sources, stages=stages), "stages")
    expect_same(bytes_settings(sources, stages=stages, tokens=12345), "stages and tokens")
    expect_same(bytes_settings(make_corpus(15, 120), tokens=5000), "a pool and tokens")
    run(bytes_settings(weighted(15, (0.5, 0.5)), tokens=10**9), DATA, [r"data\.tokens asks for 1000000000 tokens"])


def test_bos_and_eos():
    for bos in (False, True):
        for eos in (False, True):
            expect_same(bytes_settings(make_corpus(16), bos, eos), f"bos {bos} eos {eos}", bos=bos, eos=eos)


def tokenizer_json(names, config=None):
    """A byte-level vocabulary without merges, ids in an order of their own: id = (byte * 37 + 11) mod 256."""
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    letters, spare = {}, 256
    for b in range(256):
        letters[b] = chr(b) if b in printable else chr(spare)
        spare += b not in printable
    folder = "tokenizer-" + "-".join(re.sub(r"\W", "", n) for n in names)
    vocab = {letters[b]: (b * 37 + 11) % 256 for b in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    data = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level, "post_processor": None,
            "decoder": level, "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                                        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
            "added_tokens": [{"id": 256 + i, "content": n, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                              "special": True} for i, n in enumerate(names)]}
    write(f"{folder}/tokenizer.json", json.dumps(data).encode())
    if config:
        write(f"{folder}/tokenizer_config.json", json.dumps(config).encode())
    return f"{folder}/tokenizer.json"


def counts_of(settings):
    """By source: documents, empty, invalid, U+FFFD put, dropped for it, duplicates: read anew, beside the model."""
    rows, seen = [], set()
    for source in settings["sources"]:
        row = [0] * 6
        for path in model.files_of(source["path"]):
            for data, lone in model.records(path, source.get("text_key", "text")):
                row[0] += 1
                row[1] += not data
                put = data.decode("utf-8", "replace").count("\ufffd") - data.decode("utf-8", "ignore").count("\ufffd")
                if put or lone:
                    if settings["invalid_utf8"] == "drop":
                        row[4] += 1
                        continue
                    row[2] += 1
                    row[3] += lone + (put if "encode" in settings else 0)
                same = model.normalised(model.apply_policy(data, lone, "replace", "encode" not in settings))
                row[5] += bool(data) and same in seen
                if data:
                    seen.add(same)
        rows.append(row)
    return rows


def test_counts():
    """The table of what became of every source."""
    path = tokenizer_json(["<|endoftext|>"])
    for policy in ("replace", "drop"):
        for more in ({}, {"tokenizer": path, "encode": lambda t: [(b * 37 + 11) % 256 for b in t], "vocab": 257}):
            settings = bytes_settings(make_corpus(20, 240), invalid_utf8=policy, **more)
            os.chdir(ROOM)
            run(settings)
            out = Job([PROGRAM, "prepare", "run.yaml", "--force"], ROOM).end().expect(DONE).text
            found = [[int(n) for n in re.search(r"^ +%s +[\d.]+ +\d+ +(.*)$" % name, out, re.M).group(1).split()] for name in ("alpha", "beta")]
            want = counts_of(settings)
            check([row[:6] for row in found] == [row for row in want], f"{policy}: table {found}, expected {want}")
            check(want[0][5] + want[1][5] > 3 and want[0][2] + want[0][4] > 5 and want[0][1] > 0, f"the corpus has every case: {want}")
            with open(os.path.join(ROOM, "v.tokens"), "rb") as f:
                held = int.from_bytes(f.read(40)[32:], "little")
            check(sum(row[7] for row in found) == held, f"held out: {found}, {held} documents in the stream")


def test_tokenizers():
    """One token that is both BOS and EOS: one of them a document, at its end; or at its beginning where only BOS is asked for."""
    for names, ids in ((["<|endoftext|>"], (256, 256)), (["<s>", "</s>"], (256, 257))):
        path = tokenizer_json(names)
        for bos in (False, True):
            for eos in (False, True):
                first = [ids[0]] if bos and not (eos and ids[0] == ids[1]) else []
                settings = {"sources": make_corpus(17), "before": first, "after": [ids[1]] if eos else [], "tokenizer": path,
                            "bos": first[0] if first else -1, "eos": ids[1] if eos else -1, "vocab": 256 + len(names),
                            "encode": lambda t: [(b * 37 + 11) % 256 for b in t]}
                got = run(settings, bos=bos, eos=eos)
                settings["tokenizer_name"] = got[0][48:112].rstrip(b"\0").decode()
                check(settings["tokenizer_name"].startswith("tokenizer-"), f"name of the tokenizer {settings['tokenizer_name']}")
                expect_same(settings, f"{names} bos {bos} eos {eos}", bos=bos, eos=eos)


def test_refused_lines():
    """What is wrong with a line is said with file and line, the first one of all."""
    good = b'{"text": "good"}\n'
    for bad, why in ((b'{"txt": "a"}', r"the key is absent"), (b'{"text": 3}', "not a text"), (b'{"text": null}', "not a text"),
                     (b'{"text": "a"', "comma or }"), (b'["text"]', "no JSON object"), (b'{"text": "a\tb"}', "control character"),
                     (b'{"text": "a"} {}', "follows"), (b'{"text": "' + b"x" * 600000 + b'"}', "more than 524288 bytes")):
        write("bad/a.jsonl", good * 3000 + b"\n" + bad + b"\n" + good + b"{\n")
        write("bad/b.jsonl", b"nonsense")
        run(bytes_settings([{"path": "bad", "name": "bad"}]), DATA, [r"bad/a\.jsonl:3002: .*" + why], threads=3)
    write("bad/a.jsonl", good)
    write("bad/b.jsonl", good)
    for ending, tool in ((".gz", ["gzip", "-c"]), (".zst", ["zstd", "-qc"])):
        whole = subprocess.run(tool, input=os.urandom(3000).hex().encode(), stdout=subprocess.PIPE, check=True).stdout
        write("bad/c.txt" + ending, whole[:len(whole) // 2])
        run(bytes_settings([{"path": "bad", "name": "bad"}]), DATA, [r"bad/c\.txt" + re.escape(ending) + ": damaged .*too early"])
        os.remove(os.path.join(ROOM, "bad/c.txt" + ending))


def grams(ids):
    words = bytes(ids[1:-1]).lower().split()
    return [tuple(words[i:i + 13]) for i in range(len(words) - 12)]


def test_near_duplicates_and_overlap():
    """Texts with 2 of 200 words changed are dropped, the earlier stays; the report of 13-grams is what sets of tuples say."""
    r = random.Random(21)
    lexicon = [f"w{i}" for i in range(5000)]
    fresh = [[r.choice(lexicon) for _ in range(200)] for _ in range(80)]
    for a in fresh[40:]:  # a passage of 30 words of another text: shared 13-grams, no near-duplicate
        at = r.randrange(170)
        a[at:at + 30] = r.choice(fresh[:40])[at:at + 30]
    near = []
    for a in fresh[::4]:
        b = list(a)
        b[r.randrange(60)] = b[100 + r.randrange(60)] = "other"
        near.append(b)
    for name, texts in (("n/one.jsonl", fresh[:60]), ("n/two.jsonl", near + fresh[60:])):
        write(name, b"".join(json.dumps({"text": " ".join(t)}).encode() + b"\n" for t in texts))
    sources = [{"path": "n/one.jsonl", "name": "one"}, {"path": "n/two.jsonl", "name": "two"}]
    settings = bytes_settings(sources, validation_fraction=0.3)
    got = run({**settings, "dedup": "minhash"}, overlap_report=True)
    with open(os.path.join(ROOM, "t.tokens.overlap.json")) as f:
        report = json.load(f)
    # The copies of texts 0, 4, ..., 56 come later than those; the copies of 60, 64, ... come earlier.
    later = {60 + i for i in range(0, 20, 4)}
    keep = [t for i, t in enumerate(fresh[:60])], [near[i] for i in range(15, 20)] + [t for i, t in enumerate(fresh[60:], 60) if i not in later]
    for source, texts in zip(sources, keep):
        write(source["path"], b"".join(json.dumps({"text": " ".join(t)}).encode() + b"\n" for t in texts))
    want = expect_same(settings, "without the near-duplicates")
    content = [[data[:data.rindex(b"one\t")] for data in streams] for streams in (got, want)]  # all but how it was made
    check(content[0] == content[1], "near-duplicates: other documents were dropped")
    os.chdir(ROOM)
    documents = model.documents_of(settings)
    held = [d for d in documents if model.held_out(d[2], 0.3)]
    seen = {g for d in held for g in grams(d[1])}
    met = {g for d in documents if d not in held for g in grams(d[1])} & seen
    check(report["validation"] == {"documents": len(held), "grams": sum(len(grams(d[1])) for d in held), "distinct": len(seen),
                                   "met_in_training": len(met)} and met, f"validation side: {report['validation']}")
    for i, source in enumerate(sources):
        mine = [grams(d[1]) for d in documents if d[0] == i and d not in held]
        want = {"source": source["name"], "documents": len(mine), "documents_sharing": sum(any(g in seen for g in m) for m in mine),
                "grams": sum(map(len, mine)), "grams_shared": sum(g in seen for m in mine for g in m)}
        check(report["training"][i] == want and want["grams_shared"], f"{report['training'][i]}, expected {want}")


def test_threads_and_memory():
    """The same bytes from 1 to 5 threads and from two budgets, of a corpus that takes many runs."""
    sources = weighted(18, (0.82, 0.18), (1, 3), documents=6000, longest=600)
    want = None
    for threads in range(1, 6):
        got = run(bytes_settings(sources), threads=threads, prepare_memory=1 << 30 if threads == 3 else 1 << 24)
        want = want or got
        check(got == want, f"{threads} threads: other bytes")


def test_shares():
    """82/18 and others within .5 %."""
    for weights in ((0.82, 0.18), (0.5, 0.5), (0.07, 0.93)):
        sources = weighted(19, weights, documents=3000, longest=60)
        run(bytes_settings(sources))
        with open(os.path.join(ROOM, "t.tokens"), "rb") as f:
            data = f.read()
        found = re.findall(rb"(alpha|beta)\t\d+\t(\d+)\t", data[-2000:])
        tokens = {name: int(n) for name, n in found}
        share = tokens[b"alpha"] / sum(tokens.values())
        check(abs(share - weights[0] / sum(weights)) < 0.005, f"share {share} for {weights}")


if __name__ == "__main__":
    try:
        code = main(globals())
    finally:
        shutil.rmtree(ROOM, ignore_errors=True)
    sys.exit(code)
