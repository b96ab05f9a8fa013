#!/usr/bin/env python3
"""Worlds under mpirun: sums to the bit, refused launches, lost and stalled ranks.

BUILD names the build folder (default build); `make worlds` has made the program.
Prints "ok NAME" or "not ok NAME: why" for each test; exit status 0 iff all are ok.
Arguments: names of tests to run (default all).
"""
import os
import re
import signal
import sys
import tempfile
import time

from fp4d import BUILD, COMMUNICATION, DATA, PREEMPTED, ROOT, SOON, Job, check, main, take_hangups

WORLD = os.path.join(BUILD, "tests", "comm_world_main")


def start(*command, **more):
    return Job(command, ROOT, **more)


def mpirun(np, *words, **more):
    return start("mpirun", "--oversubscribe", "-np", str(np), WORLD, *map(str, words), **more)


def once(text, pattern):
    check(len(re.findall(pattern, text)) == 1, f"expected once: {pattern}", text)


def collectives(np):
    code, text, _ = mpirun(np, "collectives").end()
    check(code == 0 and "not ok" not in text, f"exit code {code}", text)
    check(text.count("ok ") == 3 * np, "three groups from each rank", text)
    locals_ = sorted(re.findall(r"local (\d+) of (\d+)", text))
    check(locals_ == [(str(r), str(np)) for r in range(np)], "local ranks", text)
    once(text, rf"topology Open MPI v[\d.]+\S*, {np} ranks? on 1 host: \S+ x{np}\n")


def test_collectives_1(): collectives(1)
def test_collectives_2(): collectives(2)
def test_collectives_3(): collectives(3)
def test_collectives_4(): collectives(4)


def test_other_algorithms_same_bits():
    # MPI's own algorithms may not matter: force the linear ones where tuned offers a choice.
    code, text, _ = mpirun(3, "collectives", OMPI_MCA_coll_tuned_use_dynamic_rules="1",
                           OMPI_MCA_coll_tuned_alltoallv_algorithm="1", OMPI_MCA_coll_tuned_allgatherv_algorithm="1",
                           OMPI_MCA_coll_tuned_allgather_algorithm="1").end()
    check(code == 0 and "not ok" not in text, f"exit code {code}", text)


def test_world_mismatch():
    for np, expected in ((3, 4), (2, 1), (1, 2)):
        code, text, seconds = mpirun(np, "open", expected).end()
        check(code == COMMUNICATION, f"exit code {code}", text)
        check(seconds < SOON, f"{seconds:.1f} s", text)
        once(text, rf"error: the configuration expects {expected} ranks?, but the launcher started {np}")


def test_world_match():
    code, text, _ = mpirun(3, "open", 3).end()
    check(code == 0 and text.count("world 3") == 3, f"exit code {code}", text)


def test_srun_singletons():
    for more in ({"SLURM_NTASKS": "4"}, {"SLURM_NPROCS": "4"}, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"}):
        code, text, seconds = start(WORLD, "open", "0", SLURM_PROCID="1", **more).end()
        check(code == COMMUNICATION and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)
        once(text, r"srun started 4 tasks")
        once(text, r"srun --mpi=pmix")


def test_mpirun_inside_slurm():
    code, text, _ = mpirun(1, "open", 1, SLURM_PROCID="0", SLURM_NTASKS="4").end()
    check(code == 0, f"exit code {code}", text)
    code, text, _ = start(WORLD, "open", "1", SLURM_NTASKS="4").end()  # a shell inside salloc
    check(code == 0, f"exit code {code}", text)


def stopped(np, victim):
    code, text, seconds = mpirun(np, "stop", victim).end()
    check(code == COMMUNICATION, f"exit code {code}", text)
    check(seconds < SOON, f"{seconds:.1f} s", text)
    return text, rf"error: rank {victim} has been silent for \d+\.\d s in 'reduce gradients' of update 7; ending the job"


def test_stopped_rank():
    for victim in (1, 2):
        text, line = stopped(3, victim)
        once(text, rf"\[r0\] {line}")
        once(text, "has been silent")


def test_stopped_rank_0():
    """The lowest living rank speaks at once. The others wait for their turn, in which the launcher ends them, be it in time or not."""
    text, line = stopped(4, 0)
    once(text, rf"\[r1\] {line}")
    check(len(re.findall("has been silent", text)) == len(re.findall(rf"\[r[123]\] {line}", text)), "every line says the same", text)
    waited = [float(s) for s in re.findall(r"\[r[23]\].* silent for (\S+) s", text)]
    check(all(s > 5 for s in waited), "the others leave it to rank 1", text)


def test_stopped_before_mpi():
    """A rank that does not come to MPI_Init: the others stand inside it."""
    for victim in (1, 0):
        code, text, seconds = mpirun(3, "stop-before-mpi", victim).end()
        check(code == COMMUNICATION and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)
        check(re.search(rf"error: rank {0 if victim else 1} has been in the start of MPI for \d+\.\d s \(limit 3 s\): a rank, or the network, does not answer; ending", text),
              "who waits, and for what", text)


def test_stopped_before_it_watches():
    """The others wait for it with no watchdog yet: the clock beside MPI's start still goes."""
    code, text, seconds = mpirun(3, "stop-unwatched", 1).end()
    check(code == COMMUNICATION and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)
    check(re.search(r"rank 0 has been in the start of MPI for \d+\.\d s \(limit 3 s\)", text), "who waits, and for what", text)


def test_stopped_before_the_watch():
    """A rank whose first heartbeat does not come."""
    for victim in (1, 0):
        code, text, seconds = mpirun(3, "stop-before-watch", victim).end()
        check(code == COMMUNICATION and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)
        once(text, rf"\[r{0 if victim else 1}\] error: rank {victim} has been silent for \d+\.\d s in 'start'; ending the job")


def test_untimed():
    """What may take any time has no limit but that of silence."""
    code, text, seconds = mpirun(3, "untimed", 1).end()
    check(code == COMMUNICATION and seconds < SOON and "indexed" in text, f"exit code {code} after {seconds:.1f} s", text)
    once(text, r"\[r0\] error: rank 1 has been silent for \d+\.\d s in 'index'; ending the job")


def test_killed_rank():
    for np, victim in ((3, 1), (2, 0)):
        code, text, seconds = mpirun(np, "kill", victim).end()
        check(code == 128 + signal.SIGKILL, f"exit code {code}", text)
        check(seconds < SOON, f"{seconds:.1f} s", text)


def test_killed_launcher():
    job = mpirun(3, "signal")
    job.wait_for("waiting")
    check(len(job.ranks(WORLD)) == 3, "three ranks")
    job.process.kill()
    job.end()


def test_stalled_operation():
    for victim in (0, 1):
        code, text, seconds = mpirun(3, "stall", victim).end()
        check(code == COMMUNICATION, f"exit code {code}", text)
        check(seconds < SOON, f"{seconds:.1f} s", text)
        once(text, rf"rank {victim} has been in 'forward' of update 7 for \d+\.\d s \(limit 2 s\); "
                   r"elsewhere: 2 ranks waiting in 'reduce gradients' of update 7")


def calm(np, mode, victim):
    code, text, seconds = mpirun(np, mode, victim).end()
    check(code == 0 and "error" not in text, f"exit code {code}", text)
    check(seconds > 4, "not as long as meant", text)


def test_slow_save(): calm(3, "slow-save", 0)
def test_slow_save_of_another_rank(): calm(3, "slow-save", 2)
def test_late_close(): calm(3, "late-close", 1)
def test_long_computation(): calm(2, "compute", 1)


def test_suspended_job():
    job = mpirun(3, "signal-watched")
    job.wait_for("waiting")
    ranks = job.ranks(WORLD)
    check(len(ranks) == 3, "three ranks")
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)  # the heartbeat limit is 2.5 s
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1)
    check(len(job.ranks(WORLD)) == 3, "goes on after a suspension", job.text())
    job.process.send_signal(signal.SIGUSR2)
    code, text, _ = job.end()
    check(code == PREEMPTED and "error" not in text, f"exit code {code}", text)


def test_abort_from_one_rank():
    code, text, seconds = mpirun(3, "abort", 1).end()
    check(code == DATA and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)


def test_early_exit_of_one_rank():
    code, text, seconds = mpirun(3, "exit", 2).end()
    check(code == DATA and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)


def test_signal_to_mpirun():
    job = mpirun(2, "signal")
    job.wait_for("waiting")
    job.process.send_signal(signal.SIGUSR2)
    code, text, _ = job.end()
    check(code == PREEMPTED, f"exit code {code}", text)


SCRIPT = {"NP": "2", "BIND": "none", "MPIRUN_ARGS": "--oversubscribe", "FP4D": WORLD}


def test_launch_script():
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        job = start("scripts/launch/mpirun.sh", "signal", prepare=take_hangups, **SCRIPT)
        job.wait_for("waiting")
        job.process.send_signal(number)
        code, text, _ = job.end()
        check(code == PREEMPTED, f"exit code {code}", text)
    code, text, _ = start("scripts/launch/mpirun.sh", "open", "3", **SCRIPT).end()
    check(code == COMMUNICATION, f"exit code {code}", text)


def test_launch_variables():
    """What docs/gpu.md and the script's head name goes to ranks on other hosts, and nothing else does."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "mpirun")
        with open(path, "w") as f:
            f.write("#!/bin/sh\necho \"$@\"\n")
        os.chmod(path, 0o755)
        given = dict.fromkeys(("NCCL_IB_HCA", "UCX_TLS", "FP4D_ISA", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "LD_LIBRARY_PATH"), folder)
        code, text, _ = start("scripts/launch/mpirun.sh", "train", "x.yaml", **SCRIPT, **given, MPIRUN=path, CUDA_OTHER="1", LD_PRELOADED="1").end()
        named = set(re.findall(r"-x (\S+)", text))
        check(code == 0 and set(given) <= named and not named & {"CUDA_OTHER", "LD_PRELOADED", "PATH"}, f"exit code {code}", text)
        check(text.rstrip().endswith("train x.yaml"), "the program's words come last", text)


def test_slurm_script():
    """With a stand-in for fp4d and scontrol: a requeue on 75 and on nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        for name, body in (("scontrol", f'echo "$@" > {folder}/requeued'),
                           ("fp4d", f'[ "$1" = train ] && shift && exec {WORLD} "$@"')):
            path = os.path.join(folder, name)
            with open(path, "w") as f:
                f.write(f"#!/bin/sh\n{body}\n")
            os.chmod(path, 0o755)
        more = {**SCRIPT, "FP4D": f"{folder}/fp4d", "PATH": folder + ":" + os.environ["PATH"],
                "SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": "17"}
        job = start("scripts/launch/slurm.sh", "open", "3", **more)
        code, text, _ = job.end()
        check(code == COMMUNICATION and not os.path.exists(f"{folder}/requeued"), f"exit code {code}", text)
        job = start("scripts/launch/slurm.sh", "signal", **more)
        job.wait_for("waiting")
        job.process.send_signal(signal.SIGUSR1)
        code, text, _ = job.end()
        check(code == PREEMPTED, f"exit code {code}", text)
        with open(f"{folder}/requeued") as f:
            check(f.read() == "requeue 17\n", "scontrol requeue 17", text)


if __name__ == "__main__":
    sys.exit(main(globals()))
