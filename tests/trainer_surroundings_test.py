#!/usr/bin/env python3
"""Odd surroundings: closed standard streams, launchers that do not fit, folders that cannot be made.

BUILD names the build folder (default build); `make worlds` has made the program that is overtaken.
Prints "ok NAME" or "not ok NAME: why"; exit status 0 iff all are ok.  Arguments: names of tests to run (default all).
"""
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess

from fp4d import BUILD, CHECKPOINT, COMMUNICATION, DATA, DONE, ENVIRONMENT, LIMIT, PREEMPTED, PROGRAM, SYSTEM, USAGE, Job, Place, check, main, words

place = Place(**{"checkpoint.every": 3, "checkpoint.keep": 0})


def closed(streams, *arguments):
    """The exit code of the program started with these file descriptors closed; no output is seen."""
    def close():
        for fd in streams:
            os.close(fd)
    return subprocess.run([PROGRAM, *arguments], cwd=place.path, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, preexec_fn=close, timeout=LIMIT).returncode


def test_closed_streams():
    """A file must not get the number of a closed stream: log lines would go into it."""
    place.run("open")
    expected = place.tensors("open", 12)
    for n in (1, 2, 3):
        for streams in itertools.combinations((0, 1, 2), n):
            name = "closed-" + "".join(map(str, streams))
            check(closed(streams, "train", "tiny.yaml", *words({"run.folder": name})) == DONE, f"{name}: trains")
            check(os.path.getsize(place.at(name, "lock")) == 0, f"{name}: nothing is written into the lock")
            check([r["update"] for r in place.lines(name, "update")] == list(range(1, 13)), f"{name}: records")
            check(place.steps(name) == [3, 6, 9, 12] and place.tensors(name, 12) == expected, f"{name}: checkpoints")
            code = closed(streams, "plan", "tiny.yaml")
            check(code == (SYSTEM if 1 in streams else DONE), f"{name}: plan ends with {code}")
            code = closed(streams, "prepare", "tiny.yaml", *words({"data.sources": ["corpus"], "data.train": name + ".tokens", "data.validation": ""}))
            with open(place.at(name + ".tokens"), "rb") as f, open(place.at("train.tokens"), "rb") as g:
                check(f.read() == g.read(), f"{name}: the stream is what it always is")
            check(code == (SYSTEM if 1 in streams else DONE), f"{name}: prepare ends with {code}")


def test_another_librarys_launcher():
    """N processes that each are a world of one must not train N times over."""
    for variables in ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, {"PMI_SIZE": "4", "PMI_RANK": "0"},
                      {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4"}):
        out = place.train("singletons", environment=variables).expect(
            COMMUNICATION, r"error: mpirun started 4 tasks, but each of them is an MPI world of one.* \(this mpirun is not that of the MPI library")
        check(not os.path.exists(place.at("singletons")), "nothing was made", out.text)
    for variables in ({"OMPI_COMM_WORLD_SIZE": "1"}, {"PMI_SIZE": "1", "PMI_RANK": "0"}, {"PMI_SIZE": "nonsense"}):
        place.train("one", {"train.updates": 1, "optimizer.warmup_updates": 0}, environment=variables).expect(DONE)
        shutil.rmtree(place.at("one"))


def test_generate_is_one_process():
    place.run("generate", {"train.updates": 3})
    out = place.command("generate", "generate", "--tokens", "3", np=2).expect(USAGE, "this command runs in one process, 2 were started")
    check(len(re.findall("error: ", out.text)) == 1, "once", out.text)


def test_eval_of_a_living_run():
    """Steps come and go while eval looks, on every rank: it evaluates one that was whole, and no rank another one."""
    job = place.start_train("living", {"train.updates": 1000000, "checkpoint.every": 1, "checkpoint.keep": 1, "optimizer.schedule": "constant",
                                       "optimizer.min_lr": 0})
    job.wait_for(r"update +3 +saved")
    for np in (0, 2):
        for _ in range(12 if np == 0 else 4):
            out = place.command("eval", "living", "tiny.yaml", np=np).expect(DONE, r"update \d+  loss \d")
            check("passed over" not in out.text, "nothing was damaged", out.text)
    job.process.send_signal(signal.SIGUSR2)
    job.end().expect(PREEMPTED)
    step = place.steps("living")[-1]
    first = place.command("eval", "living", "tiny.yaml").expect(DONE)  # of fewer updates than the checkpoint has
    second = place.command("eval", "living", "tiny.yaml", np=2).expect(DONE)
    check(f"update {step}  loss" in first.text and first.text.strip() in second.text, "one and two ranks agree", first.text + second.text)


def test_eval_overtaken():
    """The step that rank 0 chose is gone before rank 1 opens it, ten times over; a step that rank 1 never sees is an error."""
    place.run("overtaken", {"checkpoint.every": 1, "train.updates": 11})
    for update in range(2, 12):
        os.rename(place.step("overtaken", update), place.at("overtaken/checkpoints", f"later-{update:08d}"))
    shutil.copytree(place.step("overtaken", 1), place.step("overtaken", 999))  # renamed: it is no newer step
    program, place.program = place.program, os.path.join(BUILD, "tests", "trainer_overtaken_main")
    try:
        place.command("eval", "overtaken", "tiny.yaml", np=2).expect(DONE, "step-00000999 holds update 1", r"update 11  loss \d")
    finally:
        place.program = program
        shutil.rmtree(place.step("overtaken", 999))
    check(place.steps("overtaken") == [11], "all steps came and all but one went", str(place.steps("overtaken")))
    make_hosts()
    shutil.copytree(place.at("overtaken"), place.at("host0/overtaken"))
    two_hosts("eval", "overtaken", "tiny.yaml").expect(CHECKPOINT, r"error: rank 1: cannot open overtaken/checkpoints/step-00000011/manifest\.json")


def test_inspect_of_a_living_run():
    """What the run removes while inspect looks is no damage."""
    job = place.start_train("watched", {"train.updates": 1000000, "checkpoint.every": 1, "checkpoint.keep": 1, "optimizer.schedule": "constant",
                                        "optimizer.min_lr": 0})
    job.wait_for(r"update +3 +saved")
    try:
        for i in range(30):
            more = ("--verify",) if i % 2 else ()
            out = place.command("inspect", "watched" if i % 3 else "watched/checkpoints", *more).expect(DONE, r"checkpoint of update \d+", r"state +whole")
    finally:
        job.process.send_signal(signal.SIGUSR2)
        job.end().expect(PREEMPTED)
    update = place.steps("watched")[-1]
    os.remove(os.path.join(place.step("watched", update), "manifest.json"))
    out = place.command("inspect", "watched/checkpoints").expect(CHECKPOINT, rf"step-{update:08d}  .*manifest.json")
    check("meanwhile" not in out.text, "nobody removed it", out.text)


def test_plan_is_what_a_run_takes():
    """The memory that `plan` prints is laid out by the code that a run uses: equal to the byte, by category."""
    for name, settings in (("plan-bf16", {}), ("plan-mxfp4", {"route": "mxfp4-row-sr", "train.recompute": "all", "train.local_batch": 4}),
                           ("plan-boundaries", {"route": "nvfp4-global", "train.recompute": "boundaries"}),
                           ("plan-attention", {"route": "attention-mxfp4-proj-nvfp4", "train.recompute": "every-nth", "train.local_batch": 2})):
        place.run(name, {"train.updates": 1, "optimizer.warmup_updates": 0, **settings})
        out = place.command("plan", "tiny.yaml", *words(settings)).expect(DONE)
        for category, size in place.lines(name, "start")[0]["memory_bytes"].items():
            if size:
                check(re.search(rf"^  {category.replace('_', '[_ ]')} +{size / 1e6:.3f} MB", out.text, re.M), f"{name}: {category} {size}", out.text)


def test_one_sequence():
    """One held-out sequence has a loss and no standard error."""
    out = place.run("single", {"train.updates": 3, "validation.samples": 1})
    check(re.search(r"validation loss \d\.\d{4} over 1 sequence$", out.text, re.M), "its loss", out.text)
    check(place.lines("single", "validation")[-1]["standard_error"] == "nan", "in the records")
    evaluated = place.command("eval", "single", "tiny.yaml", "--samples", "1", "--json", "one.json")
    evaluated.expect(DONE, r"loss \d\.\d{6} nats/token  1 sequence, 64 targets\n", r"no interval")
    check("nan" not in out.text + evaluated.text, "no nan for people", out.text + evaluated.text)
    with open(place.at("one.json")) as f:
        one = json.load(f)
    check(one["standard_error"] == "nan" and [f"{x:.6f}" for x in one["sequence_nll"]] == [f"{one['loss']:.6f}"], "--json", str(one))
    place.command("eval", "single", "tiny.yaml", "--samples", "2").expect(DONE, r"loss \d\.\d{6} \+- \d\.\d{6} nats/token  2 sequences, 128 targets\n")


def two_hosts(*arguments):
    """Two ranks, each in a folder of its own, as on two hosts with disks of their own."""
    command = [w for host in ("host0", "host1") for w in ([":"] if host == "host1" else []) + ["-np", "1", "-wdir", place.at(host), PROGRAM, *arguments]]
    return Job(["mpirun", "--oversubscribe", "--bind-to", "none"] + command, place.path).end()


def make_hosts():
    for host in ("host0", "host1"):
        shutil.rmtree(place.at(host), ignore_errors=True)
        os.mkdir(place.at(host))
        for name in ("tiny.yaml", "train.tokens", "validation.tokens"):
            shutil.copy(place.at(name), place.at(host, name))


def test_streams_of_two_hosts():
    """A stale copy on one host would train on other text, and nobody would see it."""
    shared = words({"run.folder": place.at("hosts")})
    make_hosts()
    two_hosts("train", "tiny.yaml", *shared).expect(DONE)  # copies are fine
    shutil.rmtree(place.at("hosts"))
    for name, other in (("train", "validation"), ("validation", "train")):
        make_hosts()
        shutil.copy(place.at(other + ".tokens"), place.at("host1", name + ".tokens"))
        out = two_hosts("train", "tiny.yaml", *shared).expect(DATA, rf"error: rank 1: {name}\.tokens is not what rank 0 reads: digest \w+, there \w+")
        check(len(re.findall("error: ", out.text)) == 1, "once", out.text)
        check(not os.path.exists(place.at("hosts")), "nothing was made")
    place.run("evaluated", {"train.updates": 3})
    two_hosts("eval", place.at("evaluated"), "tiny.yaml").expect(DATA, "rank 1: validation")


def test_ranks_that_compute_otherwise():
    """Another GPU, library or instruction set on one host gives other bits there: a start says so, once; how many threads a rank has is nobody's news."""
    def start(more, name):
        parts = [["-np", "1", *variables, PROGRAM, "train", "tiny.yaml", *words({"run.folder": name, "train.updates": 1, "optimizer.warmup_updates": 0})]
                 for variables in ([], more)]
        return Job(["mpirun", "--oversubscribe", "--bind-to", "none", *parts[0], ":", *parts[1]], place.path).end().expect(DONE).text
    said = "compute otherwise"
    check(said not in start([], "alike"), "nothing to say")
    text = start(["-x", "FP4D_ISA=plain-fma"], "unlike")
    check(len(re.findall(said, text)) == 1 and re.search(
        r"warning: 1 of 2 ranks compute otherwise than rank 0, as rank 1: contractions by plain-fma; rank 0: contractions by (?!plain).*; ", text), "which, and how", text)


def test_folders_of_two_hosts():
    """A run's folder on each host's own disk is found out at the start, not at the first save."""
    for there in (False, True):
        make_hosts()
        if there:
            os.mkdir(place.at("host1/run"))
        out = two_hosts("train", "tiny.yaml", *words({"run.folder": "run"})).expect(
            SYSTEM, r"error: rank 1: run\.folder run is not the folder that rank 0 has under this path \(it must lie on storage that all hosts share")
        check("update " not in out.text and os.listdir(place.at("host0/run")) == ["lock"], "no update, nothing left", out.text)
        check(not there or os.listdir(place.at("host1/run")) == [], "nothing on the other host")


def test_check_knows_what_train_will_say():
    """Where a folder cannot be made `check` says so, in time."""
    os.symlink("nowhere", place.at("dangling"))
    os.symlink("circle", place.at("circle"))
    with open(place.at("file"), "w") as f:
        f.write("text")
    os.chmod(place.at("file"), 0o755)  # it may be entered, says access(2)
    for folder in ("dangling", "dangling/below/it", "circle", "file", "file/below", "file/far/below"):
        place.command("check", "tiny.yaml", *words({"run.folder": folder})).expect(
            SYSTEM, rf"PROBLEM +folder +run\.folder {folder} cannot be made: \w+ is (?:a link to nothing|a file)", "\n1 problem\n")
        place.train(folder).expect(SYSTEM, "error: ")
    for folder in ("new", "new/below/it", "corpus"):
        place.command("check", "tiny.yaml", *words({"run.folder": folder})).expect(DONE, "all is well")
        check(not os.path.exists(place.at("new")), "check makes nothing")


def test_check_refuses_what_a_resume_would():
    """Every change that a start refuses is a problem for `check`, with the same words and exit code."""
    route = {"run.folder": "again", "route": "mxfp4-row-sr"}
    place.run("again", {"train.updates": 4, **route})
    place.prepare("other.tokens", "held-out")
    for settings, code in (({"model.n_layers": 1}, CHECKPOINT), ({"model.tied": True}, CHECKPOINT), ({"train.param_dtype": "bf16", "train.master": False}, CHECKPOINT),
                           ({"run.seed": 7}, CHECKPOINT), ({"data.train": "other.tokens"}, DATA), ({"data.seed": 7}, DATA), ({"train.seq_len": 32}, DATA)):
        out = place.train("again", {**route, **settings}).expect(code, "error: ")
        why = re.search(r"error: (?:rank 0: )?(.*)", out.text).group(1)
        place.command("check", "tiny.yaml", *words({**route, **settings})).expect(code, r"PROBLEM +checkpoint +" + re.escape(why), "\n1 problem\n")
        if code == DATA:
            place.command("check", "tiny.yaml", *words({**route, **settings, "data.allow_change": True})).expect(DONE, "all is well")
    place.command("check", "tiny.yaml", *words(route)).expect(DONE, "goes on from there")


def test_names_of_all_kinds():
    """Quotes, spaces, letters beyond ASCII, dashes: in every path that there is."""
    odd = "-a 'b\" \u00fc\u4e2d;$(c) #d"
    os.mkdir(place.at(odd))
    shutil.copytree(place.at("corpus"), place.at(odd, odd))
    with open(place.at(odd, odd + ".yaml"), "w") as f:
        with open(place.at("tiny.yaml")) as g:
            f.write(g.read())
    settings = words({"run.name": "odd", "run.folder": odd + "/run", "data.train": f"{odd}/{odd}.tokens", "data.validation": "",
                      "data.sources": [odd + "/" + odd]})
    config = "./" + odd + "/" + odd + ".yaml"
    place.command("prepare", config, "--set", f"data.sources={odd}/{odd}", *settings[:-2]).expect(DONE)
    place.command("check", config, *settings).expect(DONE)
    place.command("train", config, *settings).expect(DONE)
    place.command("train", config, *settings, *words({"train.updates": 14}), np=2).expect(DONE, "at update 12\n")
    place.command("inspect", "./" + odd + "/run", "--verify").expect(DONE)
    place.command("generate", "./" + odd + "/run", "--tokens", "3", "--prompt", odd)
    with open(place.at(odd, "run", "metrics.jsonl")) as f:
        check(odd in json.loads(f.readline())["config"].replace('\\"', '"'), "the record has the name")


def test_memory_that_is_not_there():
    """One line with what is needed and what to do (exit 71), no crash, nothing half made."""
    sets = words({"model.hidden_size": 8192, "model.ffn_size": 32768, "model.n_layers": 64, "run.folder": place.at("large")})
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    out = subprocess.run([PROGRAM, "train", "tiny.yaml", *sets], cwd=place.path, env=ENVIRONMENT, preexec_fn=limit,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=LIMIT)
    text = out.stdout.decode("utf-8", "replace")
    check(out.returncode == SYSTEM, "exit code", text)
    check(re.search(r"error: .*needs \d+\.\d+ GiB on this rank", text) and "fp4d plan" in text, "what is needed, what to do", text)
    check(len(text.strip().splitlines()) == 1, "one line", text)
    check(not os.path.exists(place.at("large")), "nothing was made")


if __name__ == "__main__":
    raise SystemExit(main(globals(), place.close))
