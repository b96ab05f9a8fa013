#!/usr/bin/env python3
"""Vocabularies of more than bytes from outside: there and back, learning one, a run on it (prepare, check, train, generate, inspect).

BUILD names the build folder (default build).  Arguments: names of tests to run (default all).
"""
import os
import re
import subprocess

from fp4d import CONFIG, DATA, DONE, ENVIRONMENT, LIMIT, PROGRAM, ROOT, Place, check, main, words

RANKS = os.path.join(ROOT, "tests/golden/vocabulary.tiktoken")
JSON = os.path.join(ROOT, "tests/golden/tokenizer.json")
place = Place()


def tokenize(*arguments, text=b"", code=DONE):
    """What is written to standard output, and what is said."""
    done = subprocess.run([PROGRAM, "tokenize", *map(str, arguments)], input=text, capture_output=True, cwd=place.path, env=ENVIRONMENT, timeout=LIMIT)
    check(done.returncode == code, f"exit code {done.returncode}, expected {code}", done.stderr.decode("utf-8", "replace"))
    return done.stdout, done.stderr.decode("utf-8", "replace")


def put(name, data):
    path = place.at(name)
    with open(path, "wb") as f:
        f.write(data)
    return path


TEXT = "It's 1234 words \u2014 caf\u00e9, \u4f60\u597d \U0001f600\r\n<|end_of_text|>\x00 end  ".encode()


def test_there_and_back():
    """Text, raw and counted, each tokenizer, files and standard input."""
    put("text", TEXT)
    put("empty", b"")
    for name in ("bytes", RANKS, JSON):
        ids, _ = tokenize("--tokenizer", name, text=TEXT)
        check(ids.endswith(b"\n") and re.fullmatch(rb"\d+( \d+)*\n", ids), "a line of ids", ids.decode())
        check(tokenize("--tokenizer", name, "--decode", text=ids)[0] == TEXT, f"{name}: decoded text differs")
        check(tokenize("--tokenizer", name, "text")[0] == ids, f"{name}: a file and standard input differ")
        check(tokenize("--tokenizer", name, "text", "empty", "-", text=TEXT)[0] == ids + b"\n" + ids, f"{name}: a line a text")
        for raw, width in (("u16", 2), ("u32", 4)):
            data, _ = tokenize("--tokenizer", name, "--raw", raw, "text")
            numbers = [int.from_bytes(data[i:i + width], "little") for i in range(0, len(data), width)]
            check(numbers == list(map(int, ids.split())), f"{name}: {raw}")
            check(tokenize("--tokenizer", name, "--raw", raw, "--decode", text=data)[0] == TEXT, f"{name}: {raw} decoded")
        counted, _ = tokenize("--tokenizer", name, "--count", "text", "empty")
        check(re.search(rf"^ *{len(ids.split())} ids +{len(TEXT)} bytes .* text\n +0 ids +0 bytes .* empty\n.* in all\n$", counted.decode()), "--count", counted.decode())
        special, _ = tokenize("--tokenizer", name, "--special", text=TEXT)
        check(len(special.split()) < len(ids.split()), f"{name}: --special")
        check(tokenize("--tokenizer", name, "--decode", text=special)[0] == TEXT, f"{name}: a special decoded")


def test_learning():
    """The same file whatever the order of texts; other forms of the same text; too little text."""
    os.makedirs(place.at("texts"), exist_ok=True)
    for i, path in enumerate(("docs/numerics.md", "docs/formats.md", "README.md")):
        with open(os.path.join(ROOT, path), "rb") as f:
            put(f"texts/{i}.txt", f.read())
    tokenize("--train", 512, "--output", "made/a.tiktoken", "texts")
    tokenize("--train", 512, "--output", "b.tiktoken", "texts/2.txt", "texts/0.txt", "texts/1.txt")
    with open(place.at("made/a.tiktoken"), "rb") as a, open(place.at("b.tiktoken"), "rb") as b:
        check(a.read() == b.read(), "the order of texts changes what is learnt")
    put("small.txt", b"ab ab")
    said = tokenize("--train", 512, "--output", "c.tiktoken", "small.txt", code=DATA)[1]
    check("it is enough for 259 ids" in said, "too little text", said)
    check(not os.path.exists(place.at("c.tiktoken")), "an output was left")


def test_a_run():
    """A vocabulary of 300 ids from its own corpus: prepare to generate, and a file that has moved."""
    place.command("tokenize", "--train", "300", "--output", "own.tiktoken", "corpus").expect(DONE, "300 ids learnt")
    settings = {"data.tokenizer": "own.tiktoken", "model.vocab_size": 320, "data.train": "own.tokens", "data.validation": "own-v.tokens", "run.folder": "own", "data.sources": "corpus", "data.validation_fraction": 0.3, "validation.samples": 1}
    place.command("prepare", "tiny.yaml", *words(settings)).expect(DONE, "tokens")
    place.command("check", "tiny.yaml", *words(settings)).expect(DONE, r"ok +tokenizer +own-[0-9a-f]{12}: 300 ids, BOS 298, EOS 299", "all is well")
    place.command("check", "tiny.yaml", *words({**settings, "model.vocab_size": 299})).expect(
        CONFIG, r"PROBLEM +tokenizer +model\.vocab_size: 299 is less than the 300 ids of data\.tokenizer own\.tiktoken")
    place.command("check", "tiny.yaml", *words({**settings, "data.tokenizer": "bytes"})).expect(
        DATA, r"own\.tokens was made with tokenizer own-[0-9a-f]{12}, data\.tokenizer is bytes")
    place.command("check", "tiny.yaml", *words({**settings, "data.tokenizer": "absent"})).expect(DATA, r"PROBLEM +tokenizer +there is no tokenizer absent")
    place.command("train", "tiny.yaml", *words({**settings, "train.updates": 2, "optimizer.warmup_updates": 1})).expect(DONE)
    place.command("generate", "own", "--tokens", "4", "--prompt", "The caf\u00e9").expect(DONE, "The caf\u00e9")
    place.command("inspect", "own.tokens").expect(DONE, "own-[0-9a-f]{12}, vocabulary 300", r"[|#] 298 \d+")
    place.command("inspect", "own.tokens", "--tokenizer", "own.tiktoken").expect(DONE, r"[|#] <\|begin_of_text\|>")
    place.command("inspect", "own.tokens", "--tokenizer", RANKS).expect(DATA, r"was made with tokenizer own-\w+, --tokenizer is vocabulary-\w+")
    os.rename(place.at("own.tiktoken"), place.at("moved.tiktoken"))
    place.command("generate", "own", "--tokens", "4").expect(DATA, "there is no tokenizer own.tiktoken.*--tokenizer FILE")
    place.command("generate", "own", "--tokens", "4", "--tokenizer", "moved.tiktoken", "--prompt", "Hi").expect(DONE, "Hi")


if __name__ == "__main__":
    raise SystemExit(main(globals(), place.close))
