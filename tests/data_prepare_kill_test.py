#!/usr/bin/env python3
"""`fp4d prepare` killed with SIGKILL at random moments: what was finished is kept, and the bytes at the end are the same.

BUILD names the build folder (default build).  FP4D_TEST_SEED chooses other moments.  Prints "ok NAME" or "not ok NAME: why"
for each test; exit status 0 iff all are ok.
"""
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time

from fp4d import DATA, DONE, Job, LIMIT, PROGRAM, Skipped, check, main

ROOM = tempfile.mkdtemp(prefix="fp4d-kill-")
KILLS = 20
WORDS = [f"word{i * i % 977}" for i in range(400)]


def at(*parts):
    return os.path.join(ROOM, *parts)


def make_corpus(seed, lines):
    r = random.Random(seed)
    os.makedirs(at("corpus"), exist_ok=True)
    for name, count in (("big", lines), ("small", lines // 8)):
        with open(at("corpus", name + ".jsonl"), "w") as f:
            for i in range(count):
                text = " ".join(r.choice(WORDS) for _ in range(r.randrange(1, 120)))
                f.write(json.dumps({"text": text if i % 50 else "again and again"}) + "\n")


def configure(**data):
    mapping = {"sources": [{"path": "corpus/big.jsonl", "weight": 0.7}, {"path": "corpus/small.jsonl", "weight": 0.3, "max_repetition": 4}],
               "train": "t.tokens", "validation": "v.tokens", "validation_fraction": 0.1, "prepare_memory": 16777216, **data}
    with open(at("run.yaml"), "w") as f:
        json.dump({"model": {"preset": "tiny"}, "run": {"threads": 2}, "data": mapping}, f)


def start(*arguments, **options):
    return Job([PROGRAM, "prepare", "run.yaml", *arguments], ROOM, **options)


def streams():
    out = []
    for name in ("t.tokens", "v.tokens"):
        with open(at(name), "rb") as f:
            out.append(f.read())
    return out


def clear():
    for name in os.listdir(ROOM):
        if name.startswith(("t.tokens", "v.tokens")):
            shutil.rmtree(at(name)) if os.path.isdir(at(name)) else os.remove(at(name))


def gone_on(text):
    """How many records an earlier process had finished; None: it began anew."""
    found = re.search(r"goes on after (\d+) records", text)
    return int(found.group(1)) if found else 10**9 if "all sources are read already" in text else None


def test_killed():
    make_corpus(3, 40000)
    configure()
    clear()
    job = start()
    job.end().expect(DONE, "together")
    took = time.monotonic() - job.began
    want = streams()
    r = random.Random(int(os.environ.get("FP4D_TEST_SEED", "1")))
    clear()
    killed, before, resumed, finished = 0, 0, 0, 0
    while killed < KILLS or (resumed < 3 and killed < 10 * KILLS):
        job = start()
        time.sleep(r.uniform(0, 1.1) * took)
        alive = job.process.poll() is None
        if alive:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
            killed += 1
        # Kills are to meet all of the work, be the machine slower or faster than before.
        took *= 1.05 if alive else 0.8
        here = gone_on(job.text())
        if here is not None:
            resumed += 1
            check(here >= before, f"went on after {here} records where {before} were finished", job.text())
            before = here
        if not alive:
            check(job.process.returncode == DONE, "ended by itself", job.text())
            check(streams() == want, "other bytes after kills")
            finished += 1
            clear()
            before = 0
        job.end()
    start().end().expect(DONE)
    check(streams() == want, f"other bytes after {killed} kills")
    left = sorted(n for n in os.listdir(ROOM) if n.startswith(("t.tokens", "v.tokens")))
    check(left == ["t.tokens", "v.tokens"], f"left behind: {left}")
    check(resumed >= 3, f"only {resumed} of {killed} starts went on from finished work")


def test_killed_at_system_calls():
    """At every rename and every removal in turn, so between any two of them: the same bytes, nothing left behind."""
    if not shutil.which("strace"):
        raise Skipped("no strace")
    make_corpus(6, 8000)
    configure()
    clear()
    start().end().expect(DONE)
    want, killed = streams(), 0
    for call in ("rename", "unlink", "rmdir", "unlinkat"):
        for number in range(1, 100):
            clear()
            job = Job(["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={number}",
                       PROGRAM, "prepare", "run.yaml"], ROOM)
            job.process.wait(LIMIT)
            if "ptrace" in job.text() or "PTRACE" in job.text():
                raise Skipped("strace may not trace")
            if job.process.returncode == DONE:
                break
            killed += 1
            out = start().end().expect(DONE)
            check(streams() == want, f"other bytes after a kill at {call} {number}", out.text)
            left = sorted(n for n in os.listdir(ROOM) if n.startswith(("t.tokens", "v.tokens")))
            check(left == ["t.tokens", "v.tokens"], f"left behind after a kill at {call} {number}: {left}", out.text)
    check(killed > 12, f"{killed} kills")


def test_killed_between_the_names():
    """One stream has its name and the other not: the next start finishes it, without --force."""
    make_corpus(3, 40000)
    configure()
    clear()
    start().end().expect(DONE)
    want = streams()
    clear()
    # A limit on file size ends it when the training stream is written: all runs are finished by then.
    size = len(want[0]) - 1000
    start(prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))).end().expect(DATA, r"t\.tokens\.tmp.*File too large")
    check(os.path.isdir(at("t.tokens.work")) and not os.path.exists(at("t.tokens")), "work stays, no stream is there")
    with open(at("v.tokens"), "wb") as f:
        f.write(want[1])
    start().end().expect(DATA, r"v\.tokens exists and t\.tokens does not \(--force")
    open(at("t.tokens.work", "publishing"), "w").close()  # as it is there between the two names
    start("--set", "data.seed=8").end().expect(DATA, r"streams were being published, and .* is of other sources or settings")
    check(open(at("v.tokens"), "rb").read() == want[1], "the stream that is there stays")
    start().end().expect(DONE, "all sources are read already")
    check(streams() == want, "other bytes")


def test_other_request():
    """Work of other settings or of changed sources is not used; shares and lengths may change, they act later."""
    make_corpus(4, 12000)
    configure()
    clear()
    small = 1 << 20
    limited = dict(prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6 * small, 6 * small)))
    start(**limited).end().expect(DATA, "File too large")
    check(os.path.isdir(at("t.tokens.work", "runs")), "work stays")
    start("--set", "data.tokens=200000").end().expect(DONE, "all sources are read already")
    clear()
    start(**limited).end().expect(DATA, "File too large")
    start("--set", "data.seed=9").end().expect(DONE, "of other sources or settings: begun anew")
    clear()
    start(**limited).end().expect(DATA, "File too large")
    with open(at("corpus", "small.jsonl"), "a") as f:
        f.write('{"text": "one more"}\n')
    out = start().end().expect(DONE, "of other sources or settings: begun anew")
    check("goes on" not in out.text, "nothing old is used", out.text)


def test_two_at_once():
    make_corpus(5, 60000)
    configure()
    clear()
    first = start()
    until = time.monotonic() + LIMIT
    while not os.path.exists(at("t.tokens.work", "request")) and first.process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    first.process.send_signal(signal.SIGSTOP)
    first.await_stop()
    start().end().expect(DATA, r"another process prepares t\.tokens")
    first.process.send_signal(signal.SIGCONT)
    first.end().expect(DONE)


if __name__ == "__main__":
    try:
        code = main(globals())
    finally:
        shutil.rmtree(ROOM, ignore_errors=True)
    sys.exit(code)
