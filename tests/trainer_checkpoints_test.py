#!/usr/bin/env python3
"""Saving beside training, worlds of other sizes, weights alone, diff, reshard, virtual datasets, full disks.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

from fp4d import (CHECKPOINT, DONE, H5PY_PYTHON, LIMIT, PREEMPTED, PROGRAM, USAGE, Job, Place, Skipped, check, have_h5py, main, same)

place = Place()
DIFFER = 1


def diff(a, b, code=DONE, *patterns):
    return place.command("diff", a, b).expect(code, *patterns)


def test_async_is_no_change():
    """With or without a thread, compressed or not: the same records, tensors and checkpoints."""
    settings = {"checkpoint.every": 3, "checkpoint.keep": 0}
    place.train("apart", settings).expect(DONE, r"update +12 +saved in \S+ s, stalled \d+ ms, ")
    place.train("at-once", {**settings, "checkpoint.async": False, "checkpoint.compression": "store"}).expect(DONE)
    check(place.steps("apart") == place.steps("at-once") == [3, 6, 9, 12], f"steps {place.steps('apart')}")
    same(place.updates("apart"), place.updates("at-once"), "updates")
    for step in (3, 12):
        diff(place.step("apart", step), place.step("at-once", step), DONE, r"63 tensors are equal, 0 differ")
    for name in ("apart", "at-once"):
        for r in place.lines(name, "checkpoint"):
            late = r["published"] - r["update"]
            check(0 <= late <= (3 if name == "apart" else 0), f"{name}: {r}")
            check(float(r["stall_ms"]) > 0 and float(r["seconds"]) > 0 and r["bytes"] > 100000, str(r))
            check((0.5 < float(r["ratio"]) < 1) if name == "apart" else (1 <= float(r["ratio"]) < 1.1), str(r))


def flip_last(path):
    with open(path, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes((last[0] ^ 1,)))


def test_verified_in_shares():
    """Whoever reads a damaged file, all ranks pass it over, or refuse, in the same words; of several the first is named, once."""
    settings = {"train.global_batch": 12, "train.local_batch": 1, "checkpoint.every": 1, "checkpoint.keep": 0, "train.updates": 3}
    place.train("shares", {**settings, "run.stop_after_update": 2}, 3).expect(PREEMPTED)
    step = place.step("shares", 2)
    flip_last(os.path.join(place.at(step), "rank-00002.h5"))
    flip_last(os.path.join(place.at(step), "rank-00001.h5"))
    why = f"{step}/rank-00001.h5 is damaged: its checksum differs from the manifest's"
    for np in (0, 2, 3):
        out = place.train("shares", settings, np, ("--resume", step)).expect(CHECKPOINT, f"error: {why}")
        check(out.text.count("is damaged") == 1, f"{np}: said once", out.text)
        name = f"shares-{np}"
        shutil.copytree(place.at("shares"), place.at(name), symlinks=True)
        out = place.train(name, {**settings, "run.stop_after_update": 2}, np).expect(PREEMPTED, f"warning: checkpoint passed over: {name}/checkpoints/step-00000002/rank-00001.h5 is damaged", r"at update 1\n")
        check(out.text.count("is damaged") == 1, f"{np}: said once", out.text)
    good = place.step("shares", 1)
    place.command("reshard", good, "many", "--ranks", "9").expect(DONE)
    diff(good, "many", DONE, "0 differ")
    for rank in (7, 3, 8):
        flip_last(place.at("many", f"rank-{rank:05d}.h5"))
    diff(good, "many", CHECKPOINT, "many/rank-00003.h5 is damaged")


def test_other_worlds():
    """np 1 -> 4 -> 3 -> 1: the same samples, and parameters as far as sums in another order allow."""
    settings = {"train.global_batch": 12, "train.local_batch": 1, "checkpoint.keep": 0}
    place.train("one", settings).expect(DONE)
    for np, stop in ((0, 3), (4, 6), (3, 9)):
        place.train("many", {**settings, "run.stop_after_update": stop}, np).expect(PREEMPTED)
    place.train("many", settings).expect(DONE, r"at update 9\n")
    check(len([n for n in os.listdir(place.step("many", 6)) if n.endswith(".h5")]) == 4, "four files")
    same([r["batch_hash"] for r in place.lines("one", "update")], [r["batch_hash"] for r in place.lines("many", "update")], "samples")
    for a, b in zip(place.lines("one", "update"), place.lines("many", "update")):
        check(abs(float(a["loss"]) - float(b["loss"])) < 2e-3, f"update {a['update']}: losses {a['loss']} and {b['loss']}")
    out = diff(place.step("one", 12), place.step("many", 12), DIFFER)
    worst = max(float(m) for m in re.findall(r"^master/\S+ +\d+ +\S+ +(\S+)$", out.text, re.MULTILINE))
    check(worst < 0.02, f"relative L2 {worst}")
    # before the first change of the world nothing differs
    place.train("one-3", {**settings, "run.stop_after_update": 3}).expect(PREEMPTED)
    diff(place.step("one-3", 3), place.step("many", 3), DONE, "0 differ")


def test_reshard():
    if not os.path.exists(place.at("apart")):
        place.train("apart", {"checkpoint.every": 3, "checkpoint.keep": 0}).expect(DONE)
    step = place.step("apart", 12)
    place.command("reshard", step, "five", "--ranks", "5", "--compression", "store").expect(DONE, "update 12, 63 tensors of .* in 5 files")
    check(sorted(os.listdir(place.at("five"))) == ["manifest.json"] + [f"rank-0000{r}.h5" for r in range(5)], "five files")
    place.command("reshard", "five", "back").expect(DONE)
    for a, b in ((step, "five"), ("five", "back")):
        diff(a, b, DONE, "63 tensors are equal")
    place.command("inspect", "back", "--verify").expect(DONE, "state +whole")
    place.command("reshard", step, "five").expect(CHECKPOINT, "five is there already")
    place.command("reshard", step, "slashes//").expect(DONE)
    diff(step, "slashes", DONE, "63 tensors are equal")
    check(not [f for f in os.listdir(place.path) if f.endswith(".tmp")] and "manifest.json" in os.listdir(place.at("slashes")), "nothing beside it", str(os.listdir(place.path)))
    # several at once under one name: one makes it
    for turn in range(3):
        jobs = [Job([PROGRAM, "reshard", step, f"raced-{turn}", "--ranks", "7"], place.path) for _ in range(4)]
        ends = [job.end() for job in jobs]
        check(sorted(end.code for end in ends) == [DONE] + 3 * [CHECKPOINT] and sum("is there already" in end.text for end in ends) == 3, "one of four", str([tuple(end) for end in ends]))
        place.command("inspect", f"raced-{turn}", "--verify").expect(DONE, "state +whole")
    place.command("reshard", step, "x", "--compression", "gzip").expect(USAGE, "there are zstd and store")
    # a run goes on from it as from the original
    os.makedirs(place.at("cut/checkpoints"))
    shutil.copytree(place.at("five"), place.step("cut", 12))
    place.train("cut", {"train.updates": 13}).expect(DONE, r"at update 12\n")
    out = diff(place.step("cut", 13), step, DIFFER, r"tensors? (is|are) equal, \d+ differ")
    check("only in" not in out.text, "the same tensors", out.text)
    check(place.temporaries("cut") == [], "nothing is left")


def test_virtual_datasets():
    if not have_h5py():
        raise Skipped("no h5py")
    step = place.step("two", 2)
    place.train("two", {"run.stop_after_update": 2}, 2).expect(PREEMPTED)
    index = os.path.join(step, "index.h5")
    for file in (index, "elsewhere.h5"):
        place.command("inspect", step, "--vds", file).expect(DONE, "state +whole")
    code = """
import h5py, numpy, sys
parts, whole = {}, h5py.File(sys.argv[2], 'r')
for r in range(2):
    f = h5py.File(sys.argv[1] + '/rank-0000%d.h5' % r, 'r')
    f.visititems(lambda n, d: parts.setdefault(n, []).append(d[()]) if isinstance(d, h5py.Dataset) else None)
for name, p in parts.items():
    a, b = numpy.concatenate(p), whole[name][()]
    assert a.shape == b.shape and (a == b).all(), name
print(len(parts), 'equal')
"""
    shutil.copytree(step, place.at("a %b 100%% %s step"))  # HDF5 reads a source's name as a format
    place.command("inspect", "a %b 100%% %s step", "--vds", "formats.h5").expect(DONE)
    for file in (index, place.at("elsewhere.h5"), place.at("formats.h5")):
        done = subprocess.run([H5PY_PYTHON, "-c", code, step, file], capture_output=True, text=True, timeout=LIMIT)
        check(done.stdout == "63 equal\n", done.stdout + done.stderr)
    os.rename(os.path.join(step, "rank-00001.h5"), place.at("gone.h5"))
    code = "import h5py, numpy, sys; x = h5py.File(sys.argv[1], 'r')['master/norm.weight'][()]; print(int(numpy.isnan(x).sum()), x.size)"
    done = subprocess.run([H5PY_PYTHON, "-c", code, index], capture_output=True, text=True, timeout=LIMIT)
    check(done.stdout == "32 64\n", "a missing file reads as NaN: " + done.stdout + done.stderr)
    os.rename(place.at("gone.h5"), os.path.join(step, "rank-00001.h5"))
    place.command("inspect", step, "--vds", index).expect(CHECKPOINT, "is there already")
    place.command("inspect", "two", "--vds", "x.h5").expect(USAGE, "for a step folder")


def test_weights():
    settings = {"checkpoint.keep": 0, "optimizer.schedule": "constant", "optimizer.min_lr": 0}
    place.train("source", settings).expect(DONE)
    new = {**settings, "run.seed": 7, "optimizer.lr": 1e-4, "run.stop_after_update": 1}
    words = [w for k, v in {**new, "run.folder": "tuned"}.items() for w in ("--set", f"{k}={v}")]
    out = place.command("train", "tiny.yaml", *words, "--weights", "source")
    out.expect(PREEMPTED, r"warning: weights of source/checkpoints/step-00000012, update 12: the optimizer, the schedule and the data begin anew")
    first, last = place.lines("tuned", "update")[0], place.lines("source", "update")[-1]
    check(abs(float(first["loss"]) - float(last["loss"])) < 0.5 and float(first["loss"]) < float(place.lines("source", "update")[0]["loss"]) - 0.3,
          f"it begins where the other ended: {first['loss']}, {last['loss']}")
    check(first["batch_hash"] == place.lines("source", "update")[0]["batch_hash"] and first["samples"] == 8, "the data begin anew")
    check(place.meta("tuned", 1)["applied"] == 1, "AdamW counts from one")
    # the same command again goes on with its own; a changed learning rate is said
    words[words.index("run.stop_after_update=1")] = "run.stop_after_update=2"
    words[words.index("optimizer.lr=0.0001")] = "optimizer.lr=0.0002"
    place.command("train", "tiny.yaml", *words, "--weights", "source").expect(
        PREEMPTED, r"warning: --weights source is not used", r"at update 1\n", r"optimizer\.lr: 0?\.?\S* -> \S+")
    place.command("train", "tiny.yaml", *words, "--weights", "source", "--resume", place.step("tuned", 1)).expect(USAGE, "give one of them")
    place.command("train", "tiny.yaml", "--set", "run.folder=none", "--weights", "absent").expect(CHECKPOINT, "there is no checkpoint in absent")
    place.command("train", "tiny.yaml", "--set", "run.folder=wide", "--set", "model.ffn_size=96", "--weights", "source").expect(CHECKPOINT, "another model")
    # into other types
    place.command("train", "tiny.yaml", "--set", "run.folder=narrow", "--set", "train.param_dtype=bf16", "--set", "train.master=false", "--set",
                  "run.stop_after_update=1", "--weights", "source").expect(PREEMPTED)


def test_keep_every():
    place.train("kept", {"checkpoint.every": 1, "checkpoint.keep": 2, "checkpoint.keep_every": 5}).expect(DONE)
    check(place.steps("kept") == [5, 10, 11, 12], f"steps {place.steps('kept')}")


def test_failed_save_apart():
    for policy, code, steps in (("continue", DONE, [2, 4, 8, 10, 12]), ("stop", CHECKPOINT, [2, 4])):
        for np in (0, 2):
            name = f"failed-{policy}-{np}"
            place.train(name, {"checkpoint.every": 2, "checkpoint.keep": 0, "checkpoint.on_failure": policy, "fault": "save-error@6"}, np).expect(
                code, r"warning: update 6: checkpoint not saved: .*configured fault")
            check(place.steps(name) == steps and place.temporaries(name) == [], f"{name}: steps {place.steps(name)}")


def test_two_jobs():
    """On one folder: the second is refused, the first is none the worse for it."""
    job = place.start_train("shared", {"train.updates": 100000, "optimizer.schedule": "constant", "optimizer.min_lr": 0, "checkpoint.every": 2})
    job.wait_for(r" saved ")
    out = place.train("shared")
    check(out.code != DONE and "shared" in out.text, f"exit code {out.code}", out.text)
    job.wait_for(r"(?s)( saved .*){3}")
    os.kill(job.ranks()[0], 12)  # SIGUSR2
    check(job.end().code == PREEMPTED, "it leaves in good order")
    place.command("inspect", place.at("shared"), "--verify").expect(DONE)


@contextlib.contextmanager
def small_disk(name, size):
    path = place.at(name)
    os.makedirs(path, exist_ok=True)
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode != 0:
        raise Skipped("no tmpfs can be mounted")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_full_disk():
    """Room for two checkpoints and a bit: the third fails, by policy, and the others stay.  The records
    lie on another disk: a run that cannot write those ends (71)."""
    for policy, code in (("continue", CHECKPOINT), ("stop", CHECKPOINT)):
        name = f"small-{policy}"
        with small_disk(name + "/checkpoints", "2900k"):
            out = place.train(name, {"checkpoint.every": 2, "checkpoint.keep": 0, "checkpoint.on_failure": policy})
            out.expect(code, r"warning: update 6: checkpoint not saved: .*No space left on device")
            check(place.steps(name) == [2, 4] and place.temporaries(name) == [], str(os.listdir(place.at(name, "checkpoints"))))
            done = place.column(name, "update")
            check(done[-1] == 12 if policy == "continue" else 6 <= done[-1] <= 8, f"{policy}: updates to {done[-1]}")
            place.command("inspect", place.step(name, 4), "--verify").expect(DONE, "state +whole")


def most_memory(name, settings, update):
    """Bytes of the most memory that a run had when it stands before `update`; it is ended there."""
    job = place.start_train(name, {**settings, "fault": f"stall@{update}"})
    job.await_stop()
    with open(f"/proc/{job.process.pid}/status") as f:
        text = f.read()
    job.process.send_signal(signal.SIGKILL)
    job.end()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    check(found is not None, "it stands stopped", text)
    return int(found.group(1)) * 1024


def test_memory_of_a_resume():
    """Reading 100 MB of state takes no more than a start and an update without it, and one chunk of at most
    8 MiB in and out: not a copy of one of its buffers (one of FP32 has 30 MB)."""
    settings = {"model.hidden_size": 512, "model.ffn_size": 2048, "model.n_heads": 8, "model.n_kv_heads": 8, "train.global_batch": 2, "checkpoint.every": 1000,
                "train.updates": 4, "optimizer.warmup_updates": 1}
    for compression in ("zstd", "store"):
        with_it = {**settings, "checkpoint.compression": compression}
        fresh = most_memory(f"fresh-{compression}", with_it, 2)
        name = f"resumed-{compression}"
        place.train(name, {**with_it, "run.stop_after_update": 1}).expect(PREEMPTED)
        state = os.path.getsize(os.path.join(place.step(name, 1), "rank-00000.h5"))
        resumed = most_memory(name, with_it, 3)
        check(place.column(name, "update") == [1, 2], "it was a resume", str(place.column(name, "update")))
        print(f"# {compression}: {state / 1e6:.1f} MB of checkpoint; most memory {fresh / 1e6:.1f} MB fresh, {resumed / 1e6:.1f} MB resumed")
        check(resumed - fresh < 2 * (8 << 20), f"{compression}: a resume had {(resumed - fresh) / 1e6:.1f} MB more")


def test_flipped_chunk_is_named():
    step = place.step("flip", 12)
    place.train("flip").expect(DONE)
    path = os.path.join(step, "rank-00000.h5")
    with open(path, "rb") as f:
        content = bytearray(f.read())
    at = [m.start() for m in re.finditer(re.escape(b"\x28\xb5\x2f\xfd"), content)]
    content[at[len(at) // 2] + 200] ^= 4
    with open(path, "wb") as f:
        f.write(content)
    place.command("inspect", step, "--verify").expect(CHECKPOINT, r"DAMAGED\n +tensor \S+, rows from 0: cannot read .*zstd: ", "checksum differs")


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
