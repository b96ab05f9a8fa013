#!/usr/bin/env python3
"""Faults, signals, refused starts and full disks, seen from outside.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import contextlib
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

from fp4d import (CHECKPOINT, COMMUNICATION, CONFIG, DIVERGED, DONE, ENVIRONMENT, LIMIT, NOBODY, PREEMPTED, PROGRAM, SOON, SYSTEM, Job, Place,
                  Skipped, Wrong, as_nobody, built_in_routes, check, ignore_hangups, launcher, main, need_root, route_settings, same, take_hangups, words)

# Faults come at an update: what was saved before it is then no matter of chance.
EVERY = {"checkpoint.every": 1, "checkpoint.keep": 0, "checkpoint.async": False}
SHORT = {"limits.heartbeat_s": 5}
LONG = {"train.updates": 1000000, "optimizer.schedule": "constant", "optimizer.min_lr": 0, "checkpoint.at_end": False}

place = Place()


def once(out, pattern):
    check(len(re.findall(pattern, out.text)) == 1, f"expected once: {pattern}", out.text)


def goes_on_as_if_nothing(name, settings, np, update, at):
    """Without its fault the run resumes at `at` and ends as one that never had it."""
    place.train(name, settings, np).expect(DONE, rf"resumed from \S+ at update {at}\n")
    reference = f"reference-{np}-" + "-".join(f"{k}-{v}" for k, v in settings.items()).replace("/", "")
    if not os.path.exists(place.at(reference)):
        place.run(reference, settings, np)
    same(place.updates(reference), place.updates(name), name)
    same(place.tensors(reference, update), place.tensors(name, update), name + ", tensors")


# ---- divergence -------------------------------------------------------------


def each_rank(name, settings, np):
    """Trains with a shell around each rank that writes down the rank's own exit code (two ranks' output may mix)."""
    shell = 'shift; "$@"; echo $? > left-with-$OMPI_COMM_WORLD_RANK'
    command = launcher(np, "sh") + ["-c", shell, "sh", "sh", PROGRAM, "train", "tiny.yaml", *words({"run.folder": name, **settings})]
    out, codes = Job(command, place.path).end(), []
    for rank in range(np):
        with open(place.at(f"left-with-{rank}")) as f:
            codes.append(int(f.read()))
        os.remove(f.name)
    return out, codes


def test_nan_halts():
    for rank in (0, 1):
        name = f"nan-{rank}"
        out, codes = each_rank(name, {**EVERY, "fault": f"nan@7/{rank}"}, 2)
        check(codes == [DIVERGED, DIVERGED], f"exit codes {codes}", out.text)
        once(out, r"error: update 7: 1 non-finite gradient elements, first in layers\.\d+\.\S+ \(no parameter was changed")
        check(place.steps(name) == [1, 2, 3, 4, 5, 6], "six checkpoints")
        last = place.lines(name, "update")[-1]
        check(last["update"] == 7 and last["verdict"] == "halted" and last["nonfinite"] == 1 and "layers." in last["reason"],
              "the halt is on record", str(last))
        check(place.lines(name)[-1]["reason"] == "diverged", "the end is on record")
        goes_on_as_if_nothing(name, EVERY, 2, 12, 6)


def test_nan_halts_alone():
    for name, settings in (("nan-alone", EVERY), ("nan-bf16", {**EVERY, "train.gradient_dtype": "bf16"})):
        place.train(name, {**settings, "fault": "nan@3"}).expect(DIVERGED, r"update 3: 1 non-finite gradient elements, first in layers\.")
        goes_on_as_if_nothing(name, settings, 0, 12, 2)


def unchanged_by(name, update):
    same(place.tensors(name, update - 1), place.tensors(name, update), f"{name}: tensors before and after update {update}")


def test_nan_skipped():
    settings = {**EVERY, "divergence.nonfinite": "skip", "divergence.window": 4}
    for np, update in ((0, 3), (2, 8)):
        name = f"skip-{np}"
        place.train(name, {**settings, "fault": f"nan@{update}/{max(0, np - 1)}"}, np).expect(
            DONE, rf"update {update} skipped: 1 non-finite gradient elements, first in layers\.")
        unchanged_by(name, update)
        records = place.lines(name, "update")
        check([r["update"] for r in records if r["verdict"] != "applied"] == [update], "one update is skipped")
        seen = records[update - 1]
        check(seen["nonfinite"] == 1 and math.isfinite(float(seen["loss"])), "what was seen is on record", str(seen))
        for r in records[:update - 1] + records[update:]:
            values = [float(r[k]) for k in ("loss", "grad_norm", "loss_z", "grad_norm_z", "update_to_weight")]
            check(all(math.isfinite(v) for v in values), f"finite values in {r}")
        check(any(float(r["grad_norm_z"]) != 0 for r in records[update:]), "the window goes on judging")
        check(place.meta(name, 12)["applied"] == 11 and place.meta(name, 12)["samples"] == 96, "eleven updates counted for AdamW")
        # Resuming after the skip is like never having stopped.
        place.train(name + "-2", {**settings, "fault": f"nan@{update}/{max(0, np - 1)}", "run.stop_after_update": update + 1}, np).expect(PREEMPTED)
        place.train(name + "-2", settings, np).expect(DONE)
        same(place.updates(name), place.updates(name + "-2"), name + ", resumed after the skip")
        same(place.tensors(name, 12), place.tensors(name + "-2", 12), name + ", resumed after the skip: tensors")


def test_spike_of_one_rank():
    settings = {**EVERY, "divergence.grad_norm": "skip", "divergence.window": 4, "divergence.grad_norm_z": 1000, "fault": "spike@9/1"}
    out, codes = each_rank("spike", settings, 2)
    check(codes == [DONE, DONE], f"exit codes {codes}", out.text)
    once(out, r"update 9 skipped: gradient norm 1e\+06 stands \S+ standard deviations above its last 4 values")
    unchanged_by("spike", 9)  # each rank wrote half of the rows
    records = place.lines("spike", "update")
    check([r["update"] for r in records if r["verdict"] == "skipped"] == [9], "one update is skipped")
    check(float(records[8]["grad_norm_z"]) > 1e3 and all(abs(float(r["grad_norm_z"])) < 1e3 for r in records[9:]),
          "the spike does not enter the window")
    out, codes = each_rank("spike-halt", {**settings, "divergence.grad_norm": "halt"}, 2)
    check(codes == [DIVERGED, DIVERGED] and place.steps("spike-halt")[-1] == 8, f"exit codes {codes}", out.text)
    place.train("spike-record", {**settings, "divergence.grad_norm": "record"}, 2).expect(DONE, r"update 9 applied: gradient norm")


def test_overflow_in_every_route():
    """Without a planted fault: a step of 100 makes parameters whose products overflow in the next forward.

    Attention's codes may saturate instead: then its gradient's zeros tell."""
    wild = {"optimizer.lr": 100, "optimizer.min_lr": 0, "optimizer.schedule": "constant", "optimizer.warmup_updates": 0,
            "optimizer.weight_decay": 1}
    for i, route in enumerate(built_in_routes()):
        settings, name, np = {**EVERY, **route_settings(route), **wild}, "wild-" + route.replace("/", "-"), 0 if i % 4 else 2
        seen = r"\d+ non-finite gradient elements, first in \S+"
        if route.startswith("attention-"):
            seen += r"|\d+\.\d % of attention's ds became zero by rounding"
        out = place.train(name, {**settings, "divergence.attention_zeros": "halt"}, np)
        out.expect(DIVERGED, rf"error: update 2: ({seen}) \(no parameter was changed")
        check(place.steps(name) == [1] and place.lines(name, "update")[-1]["verdict"] == "halted", f"{name}: the halt is on record")
        out = place.train(name + "-skip", {**settings, "divergence.nonfinite": "skip", "divergence.attention_zeros": "skip"}, np)
        out.expect(DONE, rf"update 2 skipped: ({seen})", r"update 4 skipped: ")
        check([r["verdict"] for r in place.lines(name + "-skip", "update")] == ["applied"] + 3 * ["skipped"], f"{name}: verdicts")
        same(place.tensors(name, 1), place.tensors(name + "-skip", 4), name + ": tensors after three skipped updates")


# ---- ranks that die or stall ------------------------------------------------


def test_killed_rank():
    for rank in (0, 1):
        name = f"kill-{rank}"
        place.train(name, {**EVERY, "fault": f"kill@7/{rank}"}, 2).expect(137, rf"rank {rank} .*signal 9")
        goes_on_as_if_nothing(name, EVERY, 2, 12, 6)


def test_killed_alone():
    place.train("kill-alone", {**EVERY, "fault": "kill@7"}).expect(-signal.SIGKILL)
    goes_on_as_if_nothing("kill-alone", EVERY, 0, 12, 6)


def test_stalled_rank():
    for rank in (0, 1):
        name = f"stall-{rank}"
        # Updates about as long as the half second between heartbeats: the last one heard may be of an earlier moment.
        settings = {**EVERY, "train.global_batch": 1024, "train.updates": 2, "optimizer.warmup_updates": 0}
        place.train(name, {**settings, **SHORT, "fault": f"stall@2/{rank}"}, 2).expect(
            COMMUNICATION, rf"\[r{1 - rank}\] error: rank {rank} has been silent for \d+\.\d s in '[a-z ]+'(?: of update [12])?; ending the job")
        goes_on_as_if_nothing(name, settings, 2, 2, 1)


def test_stopped_at_the_start():
    """A rank that is stopped as soon as it is there, in MPI's start or after it; an evaluation and a measurement are watched, too."""
    place.run("watched", {"train.updates": 1, "optimizer.warmup_updates": 0})
    limits = words({"limits.start_s": 6, "limits.heartbeat_s": 2.5})
    for command in (["train", "tiny.yaml", "--set", "run.folder=never"], ["eval", "watched", "tiny.yaml"],
                    ["bench", "collectives", "tiny.yaml", "--megabytes", "64", "--repeat", "1000"]):
        job = place.start(*command, *limits, np=2)
        while len(job.ranks()) < 2 and job.process.poll() is None:
            time.sleep(0.001)
        os.kill(job.ranks()[1], signal.SIGSTOP)
        result = job.end().expect(COMMUNICATION, r"error: rank (0 has been in the start of MPI for|1 has been silent for) \d+\.\d s .*; ending the job")
        check(result.seconds < SOON, f"{result.seconds:.1f} s", result.text)


def test_killed_launcher():
    job = place.start_train("launcher", {**LONG, "checkpoint.every": 2, **SHORT}, 2)
    job.wait_for(r"update +4 +saved")
    check(len(job.ranks()) == 2, "two ranks")
    job.process.kill()
    job.end()
    place.train("launcher", {**LONG, "train.updates": place.steps("launcher")[-1] + 3}, 2).expect(DONE, "resumed from ")


def test_term_to_launcher():
    job = place.start_train("term-launcher", {**LONG, "checkpoint.every": 2}, 2)
    job.wait_for(r"update +4 +saved")
    job.process.send_signal(signal.SIGTERM)
    out = job.end()
    check(out.code != 0, f"exit code {out.code}", out.text)
    place.train("term-launcher", {**LONG, "train.updates": place.steps("term-launcher")[-1] + 3}, 2).expect(DONE, "resumed from ")


# ---- signals ----------------------------------------------------------------


def stopped_by(name, np, send, **options):
    """A long run that `send` ends after a checkpoint; a later start goes on to the bit."""
    job = place.start_train(name, LONG, np, **options)
    job.wait_for(r"update +5/")
    send(job)
    out = job.end().expect(PREEMPTED, r"stopped on request after update (\d+) of 1000000")
    update = int(re.search(r"stopped on request after update (\d+)", out.text).group(1))
    check(place.steps(name) == [update], f"a checkpoint of update {update}", str(place.steps(name)))
    check(place.lines(name)[-1] == {"kind": "end", "update": update, "reason": "preempted"}, "the end is on record")
    settings = {**LONG, "train.updates": update + 3, "checkpoint.at_end": True}
    goes_on_as_if_nothing(name, settings, np, update + 3, update)


def test_usr2_to_launcher(): stopped_by("usr2", 2, lambda job: job.process.send_signal(signal.SIGUSR2))
def test_usr2_to_rank_0(): stopped_by("usr2-0", 2, lambda job: os.kill(job.ranks()[0], signal.SIGUSR2))
def test_usr2_to_rank_1(): stopped_by("usr2-1", 2, lambda job: os.kill(job.ranks()[1], signal.SIGUSR2))
def test_term_to_rank_1(): stopped_by("term-1", 2, lambda job: os.kill(job.ranks()[1], signal.SIGTERM))
def test_usr2_alone(): stopped_by("usr2-alone", 0, lambda job: job.process.send_signal(signal.SIGUSR2))
def test_term_alone(): stopped_by("term-alone", 0, lambda job: job.process.send_signal(signal.SIGTERM))
def test_int_alone(): stopped_by("int-alone", 0, lambda job: job.process.send_signal(signal.SIGINT))
def test_hup_alone(): stopped_by("hup-alone", 0, lambda job: job.process.send_signal(signal.SIGHUP), prepare=take_hangups)
def test_hup_to_rank_1(): stopped_by("hup-1", 2, lambda job: os.kill(job.ranks()[1], signal.SIGHUP), prepare=take_hangups)


def test_hup_under_nohup():
    job = place.start_train("nohup", LONG, prepare=ignore_hangups)
    job.wait_for(r"update +5/")
    job.process.send_signal(signal.SIGHUP)
    seen = int(re.findall(r"update +(\d+)/", job.text())[-1])
    job.wait_for(rf"update +{seen + 20}/")
    job.process.send_signal(signal.SIGTERM)
    job.end().expect(PREEMPTED)


def test_usr1():
    for np in (0, 2):
        name = f"usr1-{np}"
        job = place.start_train(name, LONG, np)
        job.wait_for(r"update +5/")
        job.process.send_signal(signal.SIGUSR1)
        job.wait_for(r"update +(\d+) +saved")
        first = int(re.search(r"update +(\d+) +saved", job.text()).group(1))
        job.wait_for(rf"update +{first + 20}/")
        before = job.text().count(" saved ")
        job.process.send_signal(signal.SIGUSR1)
        job.wait_for(rf"(?s)( saved .*){{{before + 1}}}")
        job.process.send_signal(signal.SIGUSR2)
        job.end().expect(PREEMPTED)
        saves = [r["update"] for r in place.lines(name, "checkpoint")]
        # Ranks that get one USR1 in two updates save in both.
        check(saves[0] == first and 3 <= len(saves) <= (5 if np else 3), f"saved in {saves}, the first signal at {first}")
        check(place.steps(name) == saves[-len(place.steps(name)):], f"the last saves {saves} are there: {place.steps(name)}")


def test_signal_at_the_start():
    """From the moment that signals are caught none is lost, even before the first update."""
    def catches(pid):
        with open(f"/proc/{pid}/status") as f:
            return int(re.search(r"SigCgt:\s*(\w+)", f.read()).group(1), 16) >> (signal.SIGUSR2 - 1) & 1

    # A model that takes a while to initialise.
    settings = {"model.hidden_size": 256, "model.ffn_size": 2048, "model.n_heads": 8, "model.n_layers": 3,
                "train.updates": 2, "optimizer.warmup_updates": 0}

    def start_frozen(name):
        """A run that stands still between the moment that it catches signals and its initial parameters.
        On a loaded machine it may run ahead of our look: then another one, at most ten."""
        for _ in range(10):
            shutil.rmtree(place.at(name), ignore_errors=True)
            job = place.start_train(name, settings)
            until = time.monotonic() + LIMIT
            while job.process.poll() is None and not catches(job.process.pid) and time.monotonic() < until:
                pass
            job.process.send_signal(signal.SIGSTOP)
            job.await_stop()
            text = job.text()
            if "initial parameters" not in text:
                return job
            job.process.kill()
            job.end()
        raise Wrong("caught too late\n" + text)
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        name = f"start-{number}"
        job = start_frozen(name)
        job.process.send_signal(number)
        job.process.send_signal(signal.SIGCONT)
        out = job.end()
        if number == signal.SIGUSR1:
            out.expect(DONE, r"update +1 +saved")
            check(place.steps(name) == [1, 2], f"steps {place.steps(name)}", out.text)
        else:
            out.expect(PREEMPTED, r"stopped on request after update 0 of 2")
            check(not os.path.exists(place.at(name, "checkpoints")), "there was nothing to save")
            place.run(name, settings)
            check(place.column(name, "update") == [1, 2], "starts anew")


def test_reader_goes_away():
    """The pipe that the log goes through breaks: the run ends all the same."""
    command = [PROGRAM, "train", "tiny.yaml", *words({"run.folder": "pipe", "train.updates": 300})]
    process = subprocess.Popen(command, cwd=place.path, env=ENVIRONMENT, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.readline()
    process.stdout.close()
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    check(code == DONE, f"exit code {code}")
    check(place.steps("pipe") == [300], "the final checkpoint")


# ---- refused starts ---------------------------------------------------------


def test_world_mismatch():
    for np, ranks in ((2, 4), (2, 1), (1, 2), (0, 4)):
        # The watchdog would end a start that hangs with the same code: not before this test does.
        out = place.train("mismatch", {"run.ranks": ranks, "limits.start_s": 10 * LIMIT}, np).expect(COMMUNICATION)
        once(out, rf"error: the configuration expects {ranks} ranks?, but the launcher started {max(np, 1)}")
    check(not os.path.exists(place.at("mismatch")), "nothing was made")


def test_srun_singletons():
    out = place.train("srun", environment={"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).expect(COMMUNICATION, "srun --mpi=pmix")
    once(out, "srun started 4 tasks")
    check(not os.path.exists(place.at("srun")), "nothing was made")


def test_folder_in_use():
    settings = {**LONG, "checkpoint.every": 3}
    job = place.start_train("busy", settings)
    job.wait_for(r"update +4/")
    for np in (0, 2):
        out = place.train("busy", settings, np).expect(CONFIG)
        once(out, r"error: (?:rank 0: )?run folder busy is in use by another process")
    check(job.process.poll() is None, "the first run goes on")
    job.process.send_signal(signal.SIGUSR2)
    out = job.end().expect(PREEMPTED)
    updates = place.column("busy", "update")
    check(updates == list(range(1, updates[-1] + 1)), "each update once")
    goes_on_as_if_nothing("busy", {**settings, "train.updates": updates[-1] + 2, "checkpoint.at_end": True}, 0, updates[-1] + 2, updates[-1])


# ---- files that cannot be written -------------------------------------------


def test_folder_not_writable():
    need_root()
    place.train("forbidden", prepare=as_nobody).expect(SYSTEM, r"error: .*forbidden.*: Permission denied")
    os.mkdir(place.at("closed"))
    place.train("closed", prepare=as_nobody).expect(SYSTEM, r"error: .*closed.*: Permission denied")


def test_folder_is_a_file():
    with open(place.at("file"), "w") as f:
        f.write("text")
    for np in (0, 2):
        out = place.train("file", np=np).expect(SYSTEM)
        once(out, r"error: .*\bfile\b")
        out = place.train("file/below", np=np).expect(SYSTEM)
        once(out, r"error: .*\bfile\b")
    with open(place.at("file")) as f:
        check(f.read() == "text", "the file is left alone")


def test_checkpoints_not_writable():
    need_root()
    os.makedirs(place.at("open/checkpoints"))
    os.chown(place.at("open"), NOBODY, NOBODY)
    out = place.train("open", {"checkpoint.every": 4}, prepare=as_nobody).expect(
        CHECKPOINT, r"warning: update 4: checkpoint not saved: .*Permission denied", r"warning: update 8: checkpoint not saved")
    check(place.column("open", "update") == list(range(1, 13)) and place.steps("open") == [], "twelve updates, no checkpoint", out.text)


def test_records_not_writable():
    os.makedirs(place.at("full"))
    os.symlink("/dev/full", place.at("full/metrics.jsonl"))
    for np in (0, 2):
        out = place.train("full", np=np).expect(SYSTEM)
        once(out, r"error: (?:rank 0: )?cannot write full/metrics\.jsonl")


def test_save_error():
    for np in (0, 2):
        name = f"save-{np}"
        place.train(name, {**EVERY, "fault": "save-error@7"}, np).expect(DONE, r"warning: update 7: checkpoint not saved: .*configured fault")
        check(place.steps(name) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12], f"steps {place.steps(name)}")
        check(place.column(name, "update") == list(range(1, 13)) and place.lines(name)[-1]["reason"] == "finished", "finished")
        # Where nothing later makes up for it, the exit code says so.
        place.train(name + "-last", {**EVERY, "fault": "save-error@12"}, np).expect(CHECKPOINT)
        check(place.steps(name + "-last")[-1] == 11, "the older checkpoints stay")
        goes_on_as_if_nothing(name + "-last", EVERY, np, 12, 11)
        place.train(name + "-stop", {"fault": "save-error@7", "run.stop_after_update": 7}, np).expect(CHECKPOINT)


def test_file_size_limit():
    """Every write beyond 1 MB fails (a quota): no crash, no remains, the old checkpoint stays."""
    place.train("limit", {"run.stop_after_update": 4}).expect(PREEMPTED)
    before = place.tensors("limit", 4)
    out = place.train("limit", {"checkpoint.every": 3}, prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000000, 1000000))).expect(
        CHECKPOINT, r"warning: update 6: checkpoint not saved: .*rank-00000\.h5: File too large", r"warning: update 9: checkpoint not saved")
    check(place.column("limit", "update") == list(range(1, 13)), "all updates are made", out.text)
    check(place.steps("limit") == [4] and place.temporaries("limit") == [], "the old checkpoint alone", str(os.listdir(place.at("limit/checkpoints"))))
    same(before, place.tensors("limit", 4), "the old checkpoint")
    place.train("limit").expect(DONE, r"at update 4\n")


@contextlib.contextmanager
def small_disk(name, kib):
    need_root()
    os.makedirs(place.at(name))
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", place.at(name)], capture_output=True, text=True, timeout=LIMIT)
    if made.returncode != 0:
        raise Skipped("mount: " + made.stderr.strip())
    try:
        yield place.at(name)
    finally:
        for _ in range(300):
            if subprocess.run(["umount", place.at(name)], capture_output=True, timeout=LIMIT).returncode == 0:
                break
            time.sleep(0.1)
        else:
            raise Wrong(f"{name} is still in use: a process holds it")


def contents(folder):
    """Every file's bytes."""
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as f:
            found[name] = f.read()
    return found


def test_full_disk():
    """A checkpoint is 1.3 MB: one fits beside the ballast, two fit without it.  The records lie on another disk:
    they would fill this one, be it that our looks come late."""
    settings = {**LONG, "checkpoint.every": 5, "checkpoint.compression": "store"}
    for np, apart in ((0, False), (2, False), (0, True), (2, True)):
        name = f"disk-{np}-{apart}"
        with small_disk(name + "/checkpoints", 3600) as disk:
            with open(os.path.join(disk, "ballast"), "wb") as f:
                f.write(bytes(1200000))
            job = place.start_train(name, {**settings, "checkpoint.async": apart}, np)
            job.wait_for(r"update +5 +saved")
            before = contents(place.step(name, 5))
            job.wait_for(r"(?s)(checkpoint not saved.*){3}")
            check(re.search(r"warning: update 10: checkpoint not saved: .*cannot write \S*step-00000010\.tmp/rank-0000\d\.h5: No space left on device",
                            job.text()), "what failed, and why", job.text())
            check(before == contents(place.step(name, 5)), "the old checkpoint stays as it was")
            os.remove(os.path.join(disk, "ballast"))
            job.wait_for(r"(?s)not saved.* saved in")  # the same process can save again
            job.process.send_signal(signal.SIGUSR2)
            out = job.end()
            check(out.code in (PREEMPTED, CHECKPOINT), f"exit code {out.code}", out.text)  # the last one may not fit again
            check(place.temporaries(name) == [], "no temporary is left", str(os.listdir(place.at(name, "checkpoints"))))
            newest = place.steps(name)[-1]
            shutil.copytree(place.at(name), place.at("un" + name), symlinks=True)
        place.train("un" + name, {**LONG, "train.updates": newest + 2}, np).expect(DONE, rf"at update {newest}\n")


def test_publication_order():
    """strace: temporary name, write, fsync, rename, fsync of the folder, for each thing in turn."""
    if not shutil.which("strace"):
        raise Skipped("no strace")
    calls = "trace=openat,open,creat,write,pwrite64,pwritev,writev,fsync,fdatasync,rename,renameat,renameat2,symlink,symlinkat"
    command = ["strace", "-f", "-y", "-s", "8", "-e", calls, "-o", place.at("trace"), PROGRAM, "train", "tiny.yaml",
               *words({"run.folder": "traced", "train.updates": 3})]
    out = Job(command, place.path).end()
    if out.code != DONE and "ptrace" in out.text:
        raise Skipped("strace is not permitted")
    out.expect(DONE)
    with open(place.at("trace")) as f:
        trace = [line for line in f if not re.search(r" = -1 ", line)]
    at = 0

    def then(what, pattern):
        nonlocal at
        for i in range(at, len(trace)):
            if re.search(pattern, trace[i]):
                at = i + 1
                return
        raise Wrong(f"no {what} after line {at} of the trace\n" + "".join(trace[-60:]))
    tmp, step, folder = r"checkpoints/step-00000003\.tmp", r"checkpoints/step-00000003", r"traced/checkpoints"
    then("rank file made under the temporary name", rf'open.*{tmp}/rank-00000\.h5", O_RDWR\|O_CREAT')
    then("writing of it", rf"p?write.*\(\d+<[^>]*{tmp}/rank-00000\.h5>")
    writes = [i for i, line in enumerate(trace) if re.search(rf"write.*\(\d+<[^>]*{tmp}/rank-00000\.h5>", line)]
    at = writes[-1] + 1
    then("fsync of it after its last write", rf"fsync\(\d+<[^>]*{tmp}/rank-00000\.h5>")
    then("writing of the manifest", rf"write\(\d+<[^>]*{tmp}/[^>]*manifest[^>]*>")
    then("fsync of the manifest", rf"fsync\(\d+<[^>]*{tmp}/[^>]*manifest[^>]*>")
    then("rename of the manifest", rf'rename.*{tmp}/manifest\.json"')
    then("fsync of the temporary folder", rf"fsync\(\d+<[^>]*{tmp}>")
    then("rename of the folder", rf'rename.*{tmp}", .*{step}"')
    then("fsync of the folder of checkpoints", rf"fsync\(\d+<[^>]*{folder}>")
    then("latest, under a temporary name", r'symlink.*"step-00000003", .*latest\.tmp"')
    then("rename of latest", r'rename.*latest\.tmp", .*latest"')
    then("fsync of the folder of checkpoints", rf"fsync\(\d+<[^>]*{folder}>")
    then("message", r'write\(2.*"update  ')
    early = [line for line in trace[:writes[-1]] if "saved" in line]
    check(not early, "nothing says saved before it is", "".join(early))


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
