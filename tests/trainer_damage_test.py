#!/usr/bin/env python3
"""Damaged, foreign and forbidden inputs: one clear line, the documented exit code, never a crash.

BUILD names the build folder (default build).  Every case runs with the program of the build and again with
its sanitized twin, FP4D_ASAN (default BUILD/asan/fp4d), where there is one.  Prints "ok NAME" or "not ok
NAME: why"; exit status 0 iff all are ok.  Arguments: names of tests to run (default all).
"""
import ctypes
import ctypes.util
import functools
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys

from fp4d import (BUILD, CHECKPOINT, CONFIG, DATA, DEVICE, DONE, H5PY_PYTHON, LIMIT, NOBODY, PREEMPTED, PROGRAM, ROOT, SYSTEM, USAGE, Place, Skipped,
                  as_nobody, check, have_h5py, main, need_root)

ASAN = os.environ.get("FP4D_ASAN", os.path.join(BUILD, "asan", "fp4d"))
# Small, for the sanitized program is slow: 3 updates of 2 samples.
place = Place(**{"train.seq_len": 32, "train.global_batch": 2, "train.local_batch": 1, "train.updates": 3,
                 "optimizer.warmup_updates": 0, "validation.samples": 1})
ENVIRONMENT = {"LSAN_OPTIONS": f"suppressions={place.open_to_all(ROOT + '/tests/lsan.supp')}:print_suppressions=0", "ASAN_OPTIONS": "abort_on_error=0"}
tests = {}


def read(path):
    with open(path, "rb") as f:
        return f.read()


def write(path, content):
    with open(path, "wb") as f:
        f.write(content)


def flip(path, at):
    content = bytearray(read(path))
    content[at if at >= 0 else len(content) + at] ^= 0x55
    write(path, content)


def cut(path, size):
    os.truncate(path, size if size >= 0 else os.path.getsize(path) + size)


def refused(code, pattern, *arguments, lines=1, np=0, prepare=None):
    """The command fails in one line that says why; nothing crashes."""
    out = place.command(*arguments, np=np, prepare=prepare, environment=ENVIRONMENT)
    errors = re.findall(r"^(?:\[r\d\] )?error: (.*)$", out.text, re.MULTILINE)
    for word in ("Sanitizer", "runtime error", "Segmentation", "Assertion", "core dumped", "HDF5-DIAG"):
        check(word not in out.text, word, out.text)
    check(out.code == code, f"exit code {out.code}, expected {code}", out.text)
    check(len(errors) == lines, f"{len(errors)} lines of error, expected {lines}", out.text)
    check(re.search(pattern, "\n".join(errors)), f"expected to read: {pattern}", out.text)
    return out


def case(name, function, *arguments, sanitized=True, **more):
    """Registers a test for each program."""
    def run(program):
        place.program = program
        shutil.rmtree(place.at("work"), ignore_errors=True)
        os.mkdir(place.at("work"))
        function(*arguments, **more)
    tests["test_" + name] = functools.partial(run, PROGRAM)
    if sanitized and os.path.exists(ASAN):
        tests["test_asan_" + name] = functools.partial(run, ASAN)


# ---- arguments and configuration --------------------------------------------

USES = [
    ("no_command", USAGE, None, []),
    ("unknown_command", USAGE, r"unknown command 'trian'; did you mean train\?", ["trian"]),
    ("unknown_command_flag", USAGE, r"unknown command '--bogus'", ["--bogus"]),
    ("no_config", USAGE, r"CONFIG is missing", ["train"]),
    ("two_configs", USAGE, r"one argument too many: 'b'", ["train", "tiny.yaml", "b"]),
    ("empty_argument", USAGE, r"CONFIG is empty", ["check", ""]),
    ("unknown_flag", USAGE, r"unknown flag '--frobnicate'", ["train", "tiny.yaml", "--frobnicate"]),
    ("flag_without_value", USAGE, r"--resume wants a value", ["train", "tiny.yaml", "--resume"]),
    ("empty_value", USAGE, r"--resume is empty", ["train", "tiny.yaml", "--resume="]),
    ("not_a_number", USAGE, r"--samples 'x'", ["eval", "x", "tiny.yaml", "--samples", "x"]),
    ("number_out_of_range", USAGE, r"--tokens '-1'", ["generate", "x", "--prompt", "x", "--tokens", "-1"]),
    ("help_of_nothing", USAGE, r"unknown command 'nosuch'", ["help", "nosuch"]),
    ("set_without_value", CONFIG, r"'foo' is not of the form", ["train", "tiny.yaml", "--set", "foo"]),
    ("set_unknown", CONFIG, r"optimizer\.lrr: unknown key.*optimizer\.lr|did you mean", ["train", "tiny.yaml", "--set", "optimizer.lrr=1"]),
    ("set_text_for_number", CONFIG, r"optimizer\.lr: 'abc'", ["train", "tiny.yaml", "--set", "optimizer.lr=abc"]),
    ("set_infinity", CONFIG, r"optimizer\.lr: ", ["train", "tiny.yaml", "--set", "optimizer.lr=1e999"]),
    ("absent_config", CONFIG, r"nowhere\.yaml: No such file", ["train", "nowhere.yaml"]),
    ("folder_for_config", CONFIG, r"corpus is a folder", ["train", "corpus"]),
    ("device_for_config", CONFIG, r"/dev/zero", ["train", "/dev/zero"]),
    ("stream_for_config", CONFIG, r"train\.tokens:", ["train", "train.tokens"]),
    ("unknown_backend", DEVICE, r"sm999", ["train", "tiny.yaml", "--set", "run.backend=sm999"]),
    ("unknown_route", CONFIG, r"mxfp5", ["train", "tiny.yaml", "--set", "route=mxfp5"]),
    ("unfit_batch", CONFIG, r"global_batch", ["train", "tiny.yaml", "--set", "train.global_batch=7", "--set", "train.local_batch=2"]),
]


def use(code, pattern, arguments):
    if pattern is None:
        out = place.command(*arguments)
        check(out.code == code and "fp4d train" in out.text, f"exit code {out.code}", out.text)
    else:
        refused(code, pattern, *arguments)


for name, *rest in USES:
    case("use_" + name, use, *rest)


def huge_batch():
    """More memory than there is: refused by data or by memory, not by a crash."""
    out = place.command("train", "tiny.yaml", "--set", "train.seq_len=3000", "--set", "train.local_batch=65536", "--set",
                        "train.global_batch=16777216", environment=ENVIRONMENT)
    check(out.code in (CONFIG, DATA, SYSTEM) and "rror: " in out.text and "Sanitizer" not in out.text, f"exit code {out.code}", out.text)


case("use_huge_batch", huge_batch)
case("use_unfit_route", lambda: refused(CONFIG, r"down: columns 80 are not a multiple of 32", "train", "tiny.yaml", "--set", "route=mxfp4-row-sr",
                                        "--set", "model.ffn_size=80", lines=4))


def unreadable(kind, code, pattern):
    need_root()
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    for name in ("tiny.yaml", "train.tokens"):
        shutil.copy(place.at(name), place.at("work", name))
    for base, folders, files in os.walk(place.at("work")):
        for path in [base] + [os.path.join(base, n) for n in folders + files]:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    os.chmod(place.at("work", kind), 0)
    refused(code, pattern, "train", "work/tiny.yaml", "--set", "data.train=work/train.tokens", "--set", "run.folder=work/run",
            prepare=as_nobody)


case("unreadable_config", unreadable, "tiny.yaml", CONFIG, r"tiny\.yaml: Permission denied")
case("unreadable_stream", unreadable, "train.tokens", DATA, r"train\.tokens: Permission denied")
case("unreadable_records", unreadable, "run/metrics.jsonl", SYSTEM, r"metrics\.jsonl: Permission denied")
case("unreadable_folder", unreadable, "run", SYSTEM, r"work/run.*: Permission denied")
case("unreadable_checkpoints", unreadable, "run/checkpoints", CHECKPOINT, r"checkpoints.*: Permission denied")

# ---- token streams ----------------------------------------------------------


def bad_stream(damage, pattern, kind="train"):
    for name in ("train", "validation"):
        shutil.copy(place.at(name + ".tokens"), place.at("work", name + ".tokens"))
    path = place.at("work", kind + ".tokens")
    damage(path)
    refused(DATA, pattern, "train", "tiny.yaml", "--set", f"data.{kind}=work/{kind}.tokens", "--set", "run.folder=work/run")
    if os.path.isfile(path):
        out = place.command("inspect", path, "--verify", environment=ENVIRONMENT)
        check(out.code == DATA and "Sanitizer" not in out.text, f"inspect: exit code {out.code}", out.text)


def replaced(content):
    def damage(path):
        os.remove(path)
        if callable(content):
            content(path)
        else:
            write(path, content)
    return damage


SIZE = os.path.getsize(place.at("train.tokens"))
TOKENS, DOCUMENTS = struct.unpack_from("<QQ", read(place.at("train.tokens")), 24)
PAYLOAD = (TOKENS * 2 + 7) // 8 * 8 + 8 * (DOCUMENTS + 1) + DOCUMENTS
for size, pattern in ((0, "0 bytes are too few"), (1, "1 bytes are too few"), (255, "too few"), (256, "truncated or damaged"),
                      (300, "truncated or damaged"), (SIZE // 2, "truncated or damaged"), (SIZE - 64, "truncated or damaged"),
                      (SIZE - 1, "truncated or damaged")):
    case(f"stream_cut_{size}", bad_stream, functools.partial(cut, size=size), pattern)
for name, at, pattern in (
        ("magic", 0, "not a token stream"), ("version", 8, "version"), ("header_bytes", 12, "damaged header"),
        ("token_bytes", 16, "damaged header"), ("vocabulary", 20, "damaged|vocabulary"), ("tokens", 24, "damaged"), ("many_tokens", 31, "damaged"),
        ("documents", 32, "damaged"), ("block", 40, "damaged header"), ("tokenizer", 48, "damaged"), ("bos", 115, "damaged header: the id of BOS"), ("number_of_sources", 123, "damaged header"), ("reserved", 200, "damaged"),
        ("first_token", 256, r"block 0 of 1 .*does not match its digest"), ("last_token", 256 + 2 * TOKENS - 1, "does not match its digest"),
        ("offset", 256 + PAYLOAD - DOCUMENTS - 8, "does not match its digest"), ("source", 256 + PAYLOAD - 1, "does not match its digest"), ("block_digest", 256 + PAYLOAD, "digest of its header and block table"),
        ("sources", 256 + PAYLOAD + 16, "digest of its list of sources"), ("trailer", -64, "digest of its header"),
        ("sources_bytes", -32, "no valid trailer"), ("end", -1, "no valid trailer")):
    case(f"stream_flip_{name}", bad_stream, functools.partial(flip, at=at), pattern)
case("stream_longer", bad_stream, lambda path: write(path, read(path) + bytes(64)), "no valid trailer")
case("stream_text", bad_stream, replaced(b"once upon a time " * 100), "not a token stream")
case("stream_folder", bad_stream, replaced(os.mkdir), "is a folder")
case("stream_absent", bad_stream, os.remove, "No such file or directory .*fp4d prepare")
case("stream_fifo", bad_stream, replaced(os.mkfifo), "not a regular file")
case("stream_device", bad_stream, replaced(lambda path: os.symlink("/dev/zero", path)), "not a regular file")
case("stream_circle", bad_stream, replaced(lambda path: os.symlink(path, path)), "Too many levels")
case("validation_cut", bad_stream, functools.partial(cut, size=1000), "truncated or damaged", kind="validation")
case("validation_flip", bad_stream, functools.partial(flip, at=256), "does not match its digest", kind="validation")


def stream_in_use_cut():
    """Somebody cuts the stream of a living run."""
    shutil.copy(place.at("train.tokens"), place.at("work/train.tokens"))
    job = place.start_train("work/run", {"data.train": "work/train.tokens", "train.updates": 1000000, "optimizer.schedule": "constant",
                                         "optimizer.min_lr": 0}, environment=ENVIRONMENT)
    job.wait_for(r"update +3/")
    cut(place.at("work/train.tokens"), 1000)
    job.end().expect(DATA, r"error: (sample \d+: )?work/train\.tokens ends at byte \d+: it was cut after it was opened")


case("stream_in_use_cut", stream_in_use_cut)
case("stream_too_short", lambda: refused(DATA, r"a sample needs 100001 tokens", "train", "tiny.yaml", "--set", "train.seq_len=100000",
                                         "--set", "run.folder=work/run"))
case("stream_beyond_vocabulary", lambda: refused(CONFIG, r"vocab_size: 200 is less than the 258 ids", "train", "tiny.yaml", "--set",
                                                 "model.vocab_size=200", "--set", "run.folder=work/run"))
case("two_ranks_say_it_once", lambda: refused(DATA, r"nowhere\.tokens", "train", "tiny.yaml", "--set", "data.train=nowhere.tokens", np=2),
     sanitized=False)  # MPI leaks

# ---- checkpoints ------------------------------------------------------------

# Steps 1 and 2 of a run that goes on to 3.
place.train("run", {"checkpoint.every": 1, "checkpoint.keep": 0, "run.stop_after_update": 2}).expect(PREEMPTED)
# Its twin without compression, for tests that change elements in place.
place.train("plain", {"checkpoint.every": 1, "checkpoint.keep": 0, "run.stop_after_update": 2, "checkpoint.compression": "store"}).expect(PREEMPTED)
OLD, NEW = "work/run/checkpoints/step-00000001", "work/run/checkpoints/step-00000002"
RANK_BYTES = os.path.getsize(place.at("run/checkpoints/step-00000002/rank-00000.h5"))
TRAIN = ("train", "tiny.yaml", "--set", "run.folder=work/run", "--set", "checkpoint.keep=0")


def sanitizer_speaks_of_us(text):
    """HDF5 itself stumbles over some damaged files; `inspect` reads those in a process apart for that reason."""
    frames = re.findall(r"^\s*#\d+ 0x.*$", text, re.MULTILINE)
    outside = [line for line in frames if not re.search(r"sanitizer|__asan|__interceptor", line, re.I)]
    return "Sanitizer" in text and not (outside and "libhdf5" in outside[0])


def bad_checkpoint(damage, pattern):
    """The newest is damaged: named as explicit choice; passed over, loudly, by a start; both damaged: refused."""
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    damage(place.at(NEW))
    refused(CHECKPOINT, pattern, *TRAIN, "--resume", NEW)
    refused(CHECKPOINT, pattern, "eval", NEW, "tiny.yaml")
    out = place.command("eval", "work/run", "tiny.yaml", environment=ENVIRONMENT).expect(DONE, "warning: checkpoint passed over: .*step-00000002")
    check("update 1  loss" in out.text, "the older one is evaluated", out.text)
    out = place.command("inspect", NEW, "--verify", environment=ENVIRONMENT)
    check(out.code in (CHECKPOINT, DATA) and not sanitizer_speaks_of_us(out.text), f"inspect: exit code {out.code}", out.text)
    if place.program != PROGRAM and "manifest" in pattern:
        return  # the rest trains, which the sanitized program does slowly: once is enough for the rank files
    shutil.copytree(place.at("work/run"), place.at("work/both"), symlinks=True)
    out = place.command(*TRAIN, environment=ENVIRONMENT).expect(DONE, "warning: checkpoint passed over: .*step-00000002", r"at update 1\n")
    check("Sanitizer" not in out.text, "", out.text)
    check(place.steps("work/run") == [1, 3] and os.path.exists(place.at("work/run/checkpoints/superseded-00000002")),
          "the damaged one is set aside", str(os.listdir(place.at("work/run/checkpoints"))))
    check(place.column("work/run", "update") == [1, 2, 3], "each update once")
    damage(place.at("work/both/checkpoints/step-00000001"))
    refused(CHECKPOINT, r"work/both/checkpoints holds no whole checkpoint; the newest: ", "train", "tiny.yaml", "--set", "run.folder=work/both")
    refused(CHECKPOINT, r"holds no whole checkpoint", "generate", "work/both", "--prompt", "x")


def in_rank_file(damage, *more):
    return lambda step: damage(os.path.join(step, "rank-00000.h5"), *more)


def in_manifest(change):
    """Rewrites the manifest's text."""
    def damage(step):
        path = os.path.join(step, "manifest.json")
        content = read(path)
        changed = change(content)
        check(changed != content, "the manifest is changed")
        write(path, changed)
    return damage


def to_folder(path):
    os.remove(path)
    os.mkdir(path)


for size in (0, 100, RANK_BYTES // 2, RANK_BYTES - 1):
    case(f"rank_file_cut_{size}", bad_checkpoint, in_rank_file(cut, size), rf"rank-00000\.h5 has {size} bytes, the manifest says {RANK_BYTES}")
for at in (0, 9, 2000, RANK_BYTES // 2, RANK_BYTES - 1):
    case(f"rank_file_flip_{at}", bad_checkpoint, in_rank_file(flip, at), r"rank-00000\.h5 is damaged: its checksum differs")
case("rank_file_absent", bad_checkpoint, in_rank_file(os.remove), r"rank-00000\.h5 is missing")
case("rank_file_folder", bad_checkpoint, in_rank_file(to_folder), r"rank-00000\.h5 ")
case("manifest_absent", bad_checkpoint, lambda step: os.remove(os.path.join(step, "manifest.json")),
     r"manifest\.json|there is no checkpoint in")
case("manifest_folder", bad_checkpoint, lambda step: to_folder(os.path.join(step, "manifest.json")), r"manifest\.json")
for name, change in (
        ("empty", lambda m: b""), ("cut", lambda m: m[:len(m) // 2]), ("zeros", lambda m: bytes(len(m))), ("noise", lambda m: bytes(range(256)) * 9),
        ("list", lambda m: b"[]"), ("null", lambda m: b"null"), ("other", lambda m: b"{}"), ("deep", lambda m: b"[" * 200000),
        ("key_twice", lambda m: m.replace(b'"format"', b'"update": 2, "format"', 1)), ("no_files", lambda m: re.sub(rb"(?s)\[.*\]", b"[]", m)),
        ("version", lambda m: m.replace(b'"version": 2', b'"version": 3')), ("update", lambda m: re.sub(rb'"update": \d', b'"update": 7', m, count=1)),
        ("bytes", lambda m: m.replace(b'"bytes": ', b'"bytes": -')), ("path", lambda m: m.replace(b"rank-00000", b"../../rank-00000")),
        ("seed", lambda m: m.replace(b'\\"seed\\":42', b'\\"seed\\":43')), ("samples", lambda m: re.sub(rb'samples\\":\d+', rb'samples\\":9', m)),
        ("digest", lambda m: re.sub(rb'"xxh3_128": "(....)', rb'"xxh3_128": "\1\1', m, count=1)),
        ("no_digest", lambda m: re.sub(rb',\s*"xxh3_128": "\w+"\s*\}\s*$', b"}", m))):
    case("manifest_" + name, bad_checkpoint, in_manifest(change), r"manifest\.json")


def flipped_manifest():
    """Any one byte: either it is found, or (white space) nothing depends on it."""
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    path = place.at(NEW, "manifest.json")
    whole = read(path)
    for at in range(0, len(whole), 41 if place.program == PROGRAM else 397):
        write(path, whole)
        flip(path, at)
        out = place.command("inspect", NEW, "--verify", environment=ENVIRONMENT)
        check(out.code == CHECKPOINT and "Sanitizer" not in out.text, f"byte {at}: exit code {out.code}", out.text)


case("manifest_flipped", flipped_manifest)


def gone_latest():
    """The step that `latest` names was removed by hand."""
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    shutil.rmtree(place.at(NEW))
    place.command(*TRAIN, environment=ENVIRONMENT).expect(
        DONE, r"warning: work/run/checkpoints/latest points at step-00000002, which is not there", r"at update 1\n")
    check(os.readlink(place.at("work/run/checkpoints/latest")) == "step-00000003", "latest is the newest again")


case("latest_points_nowhere", gone_latest)


def lost_rank():
    """One of two ranks' files, in a checkpoint that one process reads."""
    if not os.path.exists(place.at("two")):
        place.train("two", {"run.stop_after_update": 1}, 2).expect(PREEMPTED)
    shutil.copytree(place.at("two"), place.at("work/run"), symlinks=True)
    os.remove(place.at(OLD, "rank-00001.h5"))
    refused(CHECKPOINT, r"rank-00001\.h5 is missing", *TRAIN)
    shutil.copy(place.at(OLD, "rank-00000.h5"), place.at(OLD, "rank-00001.h5"))
    refused(CHECKPOINT, r"rank-00001\.h5 ", *TRAIN)


case("lost_rank", lost_rank)


def other_model(settings, pattern, code=CHECKPOINT, evaluated=True):
    """What a start refuses `check` finds too; eval refuses it where it would evaluate another model."""
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    sets = [w for k, v in settings.items() for w in ("--set", f"{k}={v}")]
    refused(code, pattern, *TRAIN, *sets)
    out = place.command("check", *TRAIN[1:], *sets, environment=ENVIRONMENT)
    check(out.code == code and re.search("PROBLEM +checkpoint", out.text), f"check: exit code {out.code}", out.text)
    if evaluated:
        refused(code, pattern, "eval", "work/run", "tiny.yaml", *sets)
    check(place.steps("work/run") == [1, 2], "nothing has changed")


for name, settings, words in (
        ("wider", {"model.hidden_size": 128}, r"model\.hidden_size: 64 -> 128, model\.head_dim: 32 -> 64"),
        ("more_vocabulary", {"model.vocab_size": 300}, r"model\.vocab_size: 258 -> 300"),
        ("other_ffn", {"model.ffn_size": 160}, r"model\.ffn_size: 128 -> 160"), ("other_heads", {"model.n_kv_heads": 2}, r"model\.n_kv_heads: 1 -> 2"),
        ("same_shapes", {"model.n_heads": 4, "model.n_kv_heads": 2, "model.head_dim": 16}, r"model\.n_heads: 2 -> 4, model\.n_kv_heads: 1 -> 2"),
        ("more_layers", {"model.n_layers": 3}, r"model\.n_layers: 2 -> 3"), ("fewer_layers", {"model.n_layers": 1}, r"model\.n_layers: 2 -> 1"),
        ("tied", {"model.tied": "true"}, r"model\.tied: false -> true")):
    case("other_model_" + name, other_model, settings, "is of another model: " + words)
case("other_model_no_master", other_model, {"train.master": "false"}, r"train\.master: true -> false", evaluated=False)
case("other_samples_longer", other_model, {"train.seq_len": 64}, r"train\.seq_len: 32 -> 64", DATA, evaluated=False)
case("other_samples_seed", other_model, {"data.seed": 9}, r"data\.seed: 1 -> 9", DATA, evaluated=False)


def other_samples_allowed():
    """Said aloud, and tokens are counted as they were read."""
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    place.command(*TRAIN, "--set", "train.seq_len=64", "--set", "data.allow_change=true", environment=ENVIRONMENT).expect(
        DONE, r"warning: samples are others than before: train\.seq_len: 32 -> 64")
    check(place.column("work/run", "tokens") == [64, 128, 256], "tokens", str(place.column("work/run", "tokens")))
    check(place.meta("work/run", 3)["tokens"] == 256, "tokens in the checkpoint")


case("other_samples_allowed", other_samples_allowed)


def evaluated_otherwise():
    """eval may use another route or other frequencies, and says so."""
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    place.command("eval", "work/run", "tiny.yaml", "--set", "model.rope_theta=20000", "--set", "route=mxfp4-row-sr", environment=ENVIRONMENT).expect(
        DONE, r"warning: not as the checkpoint was trained: model\.rope_theta: 10000 -> 20000", r'not the checkpoint.s route: route: "bf16" -> "mxfp4-row-sr"')
    refused(DATA, r"holds \d+ samples, 1000000 are asked for", "eval", "work/run", "tiny.yaml", "--samples", "1000000")
    refused(DATA, r"holds \d+ samples, 1000000 are asked for", "train", "tiny.yaml", "--set", "validation.samples=1000000")


case("evaluated_otherwise", evaluated_otherwise)


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def xxh3(content):
    library = ctypes.util.find_library("xxhash")
    if not library:
        raise Skipped("no libxxhash")
    xxh = ctypes.CDLL(library)
    xxh.XXH3_128bits.restype, xxh.XXH3_128bits.argtypes = Hash128, (ctypes.c_char_p, ctypes.c_size_t)
    h = xxh.XXH3_128bits(content, len(content))
    return f"{h.high:016x}{h.low:016x}"


def reseal(step, change):
    """Changes a manifest and gives it the digest that the program would."""
    path = place.at(step, "manifest.json")
    manifest = json.loads(read(path))
    said = manifest.pop("xxh3_128")

    def digest():
        return xxh3(json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    check(digest() == said, "this test computes the digest as the program does")
    change(manifest)
    manifest["xxh3_128"] = digest()
    write(path, json.dumps(manifest).encode())


def version_1():
    """The format before compression."""
    shutil.copytree(place.at("plain"), place.at("work/run"), symlinks=True)
    reseal(NEW, lambda manifest: manifest.update(version=1))
    place.command(*TRAIN, environment=ENVIRONMENT).expect(DONE, r"at update 2\n")


case("version_1", version_1)


def forged(change, pattern):
    """A manifest whose digest holds but whose meta nobody can have written."""
    def change_meta(manifest):
        meta = json.loads(manifest["meta"])
        meta = change(meta) or meta
        manifest["meta"] = meta if isinstance(meta, str) else json.dumps(meta)
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    reseal(NEW, change_meta)
    refused(CHECKPOINT, pattern, *TRAIN)


def poisoned(tensor, value, pattern):
    """One element of a tensor, in a checkpoint whose digests hold: named before an update spreads it."""
    if not have_h5py():
        raise Skipped("no h5py")
    shutil.copytree(place.at("plain"), place.at("work/run"), symlinks=True)
    path = place.at(NEW, "rank-00000.h5")
    code = "import h5py, sys; d = h5py.File(sys.argv[1], 'r')[sys.argv[2]]; print(d.id.get_offset() + d.size // 2 * 4)"
    at = int(subprocess.run([H5PY_PYTHON, "-c", code, path, tensor], capture_output=True, text=True, timeout=LIMIT, check=True).stdout)
    content = bytearray(read(path))
    content[at:at + 4] = struct.pack("<f", value)
    write(path, bytes(content))
    reseal(NEW, lambda manifest: manifest["files"][0].update(xxh3_128=xxh3(bytes(content))))
    if pattern is None:
        place.command(*TRAIN, environment=ENVIRONMENT).expect(DONE)
        return
    refused(CHECKPOINT, rf"element \d+ of {tensor} is {pattern} \(an earlier step may be sound", *TRAIN)
    check(place.column("work/run", "update") == [1, 2], "no update was made from it")
    if tensor.startswith("master"):
        refused(CHECKPOINT, rf"element \d+ of {tensor} is {pattern}", "eval", "work/run", "tiny.yaml")
        refused(CHECKPOINT, rf"element \d+ of {tensor} is {pattern}", "generate", "work/run")


for name, tensor, value, pattern in (
        ("weight_nan", "master/layers.1.attention.wq.weight", math.nan, "-?nan"), ("weight_infinite", "master/norm.weight", -math.inf, "-inf"),
        ("embedding_nan", "master/tok_embeddings.weight", math.nan, "-?nan"), ("moment_nan", "adam_m/output.weight", math.nan, "-?nan"),
        ("moment_infinite", "adam_m/layers.0.feed_forward.w1.weight", math.inf, "inf"),
        ("second_moment_nan", "adam_v/layers.0.feed_forward.w2.weight", math.nan, "-?nan"),
        ("second_moment_negative", "adam_v/output.weight", -1e-9, "-1e-09"),
        ("second_moment_overflown", "adam_v/output.weight", math.inf, None)):
    case("poisoned_" + name, poisoned, tensor, value, pattern)


def outgrown():
    """Finite weights whose output is not: generate names it, eval writes it down."""
    if not have_h5py():
        raise Skipped("no h5py")
    shutil.copytree(place.at("plain"), place.at("work/run"), symlinks=True)
    path = place.at(NEW, "rank-00000.h5")
    code = "import h5py, sys; d = h5py.File(sys.argv[1], 'r')[sys.argv[2]]; print(d.id.get_offset(), d.size)"
    at, n = map(int, subprocess.run([H5PY_PYTHON, "-c", code, path, "master/output.weight"], capture_output=True, text=True, timeout=LIMIT,
                                    check=True).stdout.split())
    content = bytearray(read(path))
    content[at:at + 4 * n] = struct.pack("<f", 3e38) * n
    write(path, bytes(content))
    reseal(NEW, lambda manifest: manifest["files"][0].update(xxh3_128=xxh3(bytes(content))))
    refused(CHECKPOINT, r"the logit of token 0 is \S+ after 1 tokens", "generate", "work/run")
    place.command("eval", "work/run", "tiny.yaml", "--json", "eval.json", environment=ENVIRONMENT).expect(DONE, r"loss -?(nan|inf)")
    with open(place.at("eval.json")) as f:
        values = json.load(f)["sequence_nll"]
    check(len(values) == 1 and values[0] in ("nan", "inf"), f"NLL by sequence {values}")


case("outgrown", outgrown)


def put(key, value, *inner):
    def change(meta):
        where = meta
        for name in (key, *inner[:-1]) if inner else ():
            where = where[name]
        where[inner[-1] if inner else key] = value
    return change


for name, change, pattern in (
        ("no_meta", lambda meta: "not JSON", r"carries no configuration"), ("other_format", put("format", 1), r"meta of another format"),
        ("no_sources", lambda meta: meta.pop("source_tokens") and meta, r"meta holds impossible counts"),
        ("too_many_of_a_source", lambda meta: meta["source_tokens"].update({next(iter(meta["source_tokens"])): meta["tokens"] + 1}),
         r"meta holds impossible counts"),
        ("bad_digest", put("train_digest", "xyz"), r"names no training stream"), ("other_update", put("update", 3), r"impossible counts"),
        ("negative_samples", put("samples", -1), r"impossible counts"), ("huge_samples", put("samples", 2**62), r"impossible counts"),
        ("applied", put("applied", 3), r"impossible counts"), ("real_update", put("update", 2.0), r"impossible counts"),
        ("no_applied", lambda meta: meta.pop("applied") and meta, r"impossible counts"), ("no_samples", lambda meta: meta.pop("samples") and meta, r"impossible counts"),
        ("text_tokens", put("tokens", "9"), r"impossible counts"), ("text_count", put("loss_window", "2", "count"), r"impossible counts"), ("negative_count", put("loss_window", -5, "count"), r"impossible counts"),
        ("long_window", put("loss_window", 10**9, "window"), r"impossible counts"), ("no_values", put("grad_norm_window", None, "values"), r"impossible counts"),
        ("text_values", put("grad_norm_window", ["a"] * 2, "values"), r"impossible counts"), ("no_window", put("loss_window", 3), r"impossible counts")):
    case("forged_" + name, forged, change, pattern)


def records(damage, code, pattern):
    """metrics.jsonl and the lock as they should not be."""
    shutil.copytree(place.at("run"), place.at("work/run"), symlinks=True)
    damage(place.at("work/run/metrics.jsonl"))
    if code != DONE:
        refused(code, pattern, *TRAIN)
        return
    out = place.command(*TRAIN, environment=ENVIRONMENT).expect(DONE)
    check("Sanitizer" not in out.text, "", out.text)
    check(place.column("work/run", "update")[-1:] == [3], "goes on")


case("records_folder", records, to_folder, SYSTEM, r"metrics\.jsonl")
case("records_absent", records, os.remove, DONE, "")
case("records_noise", records, lambda path: write(path, bytes(range(256)) * 100), DONE, "")
case("records_one_long_line", records, lambda path: write(path, b"[" * 1000000), DONE, "")
case("lock_folder", records, lambda path: to_folder(path.replace("metrics.jsonl", "lock")), SYSTEM, r"work/run/lock")


def prepare_refused(sources, code, pattern):
    refused(code, pattern, "prepare", "tiny.yaml", "--force", "--set", f"data.sources={sources}", "--set", "data.train=work/t.tokens",
            "--set", "data.validation=")
    check(not os.listdir(place.at("work")), "nothing is made", str(os.listdir(place.at("work"))))


case("prepare_absent", prepare_refused, "nowhere", DATA, r"nowhere")
case("prepare_nothing", prepare_refused, "", CONFIG, r"data\.sources is empty")
case("prepare_device", prepare_refused, "/dev/zero", DATA, r"/dev/zero")

if __name__ == "__main__":
    sys.exit(main(tests, place.close))
