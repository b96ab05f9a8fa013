#!/usr/bin/env python3
"""fp4d tokenize from outside: there and back, and every input that it must refuse by name.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import os
import shutil
import struct
import subprocess
import sys
import tempfile

import token_files
from fp4d import DATA, DONE, ENVIRONMENT, LIMIT, PROGRAM, SYSTEM, USAGE, check, main

folder = tempfile.mkdtemp(prefix="fp4d-test-")
TOKENIZERS = ("bytes", "ranks.model", "tokenizer.json")


def at(name):
    return os.path.join(folder, name)


def tokenize(*arguments, given=b"", output=subprocess.PIPE):
    """Exit code, output, messages."""
    done = subprocess.run([PROGRAM, "tokenize", *arguments], input=given, stdout=output, stderr=subprocess.PIPE, cwd=folder, env=ENVIRONMENT, timeout=LIMIT)
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")


def refused(code, pattern, *arguments, given=b""):
    got, out, messages = tokenize(*arguments, given=given)
    check(got == code and pattern in messages and messages.count("error:") == 1, f"{arguments}: exit code {got}, expected {code} and '{pattern}'",
          messages + repr(out[:200]))


def setup():
    token_files.write_rank_file(at("ranks.model"))
    token_files.write_tokenizer_json(at("tokenizer.json"), ["<|begin_of_text|>", "<|end_of_text|>"])
    for name, content in {"a.txt": b"two words\n", "empty.txt": b"", "bad.txt": b"ok \xff\xfe", "random": os.urandom(50000)}.items():
        with open(at(name), "wb") as f:
            f.write(content)


setup()


def test_there_and_back():
    text = "Grüße, 世界 🙂\r\n\t x\0y  ".encode()
    for tokenizer in TOKENIZERS:
        code, ids, _ = tokenize("--tokenizer", tokenizer, given=text)
        check(code == DONE and [int(x) for x in ids.split()] == list(text), f"{tokenizer}: ids", str(ids))
        code, back, messages = tokenize("--tokenizer", tokenizer, "--decode", given=ids)
        check(code == DONE and back == text, f"{tokenizer}: back", messages)
        for kind, letter in (("u16", "H"), ("u32", "I")):
            code, raw, _ = tokenize("--tokenizer", tokenizer, "--raw", kind, given=text)
            check(code == DONE and raw == struct.pack(f"<{len(text)}{letter}", *text), f"{tokenizer}: {kind}")
            code, back, _ = tokenize("--tokenizer", tokenizer, "--raw", kind, "--decode", given=raw)
            check(code == DONE and back == text, f"{tokenizer}: {kind} back")
    code, out, _ = tokenize("a.txt", "empty.txt", "-", given=b"z")
    check(code == DONE and out == b" ".join(b"%d" % c for c in b"two words\n") + b"\n\n122\n", "a line a text", str(out))


def test_any_bytes():
    with open(at("random"), "rb") as f:
        content = f.read()
    code, ids, _ = tokenize("random")
    check(code == DONE and [int(x) for x in ids.split()] == list(content), "bytes takes any")
    code, ids, messages = tokenize("--tokenizer", "tokenizer.json", "--replace", "random")
    check(code == DONE and bytes(int(x) for x in ids.split()) == content.decode(errors="replace").encode(), "replaced as Python does")
    check(f"{content.decode(errors='replace').count(chr(0xfffd)) - content.decode(errors='ignore').count(chr(0xfffd))} times" in messages, "counted", messages)


def test_ids_refused():
    for given, pattern in ((b"1 2 -3\n", ":1: not a list of ids"), (b"1\n2,3", ":2: not a list"), (b"99999999999999999999", "not a list"), (b"4294967296", "id 4294967296"),
                           (b"0x10", "not a list"), (b"\0\0\n", "not a list"), (b"72\x0073\n", "not a list"), (b"1\n1\n\xff", ":3:"), (b"258", "id 258 is no token"),
                           (b"+1", "not a list"), (b"1.0", "not a list")):
        refused(DATA, pattern, "--decode", given=given)
    for kind, given in (("u16", b"\1\2\3"), ("u32", b"\1\2\3"), ("u32", b"\1\2\3\4\5")):
        refused(DATA, f"has {len(given)} bytes", "--decode", "--raw", kind, given=given)
    refused(DATA, "id 65535", "--decode", "--raw", "u16", given=b"\xff\xff")
    refused(DATA, "id 4294967295", "--decode", "--raw", "u32", given=b"\xff\xff\xff\xff")
    code, out, _ = tokenize("--decode", given=b" 72\t73\r\n\n 256")
    check(code == DONE and out == b"HI<|begin_of_text|>", "white space", str(out))


def test_files_refused():
    refused(DATA, "nosuch", "nosuch")
    refused(DATA, "/", "/")
    refused(DATA, "bad.txt: byte 3", "bad.txt", "--tokenizer", "ranks.model")
    for tokenizer in ("nosuch.json", ".", "/dev/null", "a.txt", "empty.txt", "random"):
        refused(DATA, tokenizer, "a.txt", "--tokenizer", tokenizer)
    refused(DATA, "nosuch", "--train", "300", "--output", "x.tiktoken", "nosuch")
    refused(DATA, "random", "--train", "300", "--output", "x.tiktoken", "random")
    refused(DATA, "258 ids", "--train", "300", "--output", "x.tiktoken", "empty.txt")
    check(not os.path.exists(at("x.tiktoken")), "nothing is left")


def test_arguments_refused():
    for arguments in (["--raw", "u8"], ["--tokenizer", "", "a.txt"], ["--train", "257", "--output", "x", "a.txt"], ["--train", "9" * 30, "--output", "x", "a.txt"],
                      ["--train", "300", "a.txt"], ["--output", "x", "a.txt"], ["--decode", "--count"], ["--decode", "--train", "300", "--output", "x", "a.txt"]):
        refused(USAGE, "tokenize", *arguments)


def test_output_lost():
    with open("/dev/full", "wb") as full:
        code, _, messages = tokenize("random", output=full)
    check(code == SYSTEM and "standard output" in messages, f"a full disk: exit code {code}", messages)
    with open(at("many.txt"), "wb") as f:
        f.write(b"the cat and the other cat " * 100)
    code, _, messages = tokenize("--train", "262", "--output", "no-such-folder/of/x.tiktoken", "many.txt")
    check(code == DONE or "x.tiktoken" in messages, f"the output's folder: exit code {code}", messages)


if __name__ == "__main__":
    sys.exit(main(globals(), lambda: shutil.rmtree(folder, ignore_errors=True)))
