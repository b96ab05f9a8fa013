#!/usr/bin/env python3
"""`fp4d doctor`: what it says of a machine without a GPU and of the host model's, alone and under mpirun, and of folders it cannot use.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"
for each test; exit status 0 iff all are ok.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

from fp4d import BUILD, COMMUNICATION, DONE, PROGRAM, SOON, SYSTEM, USAGE, Job, Skipped, check, launcher, main

folder = tempfile.mkdtemp(prefix="fp4d-doctor-")
MODEL = os.path.join(BUILD, "model", "fp4d")


def doctor(*words, np=0, program=PROGRAM, limit=SOON, **environment):
    return Job(launcher(np, program) + ["doctor", *words], folder, **environment).end(limit)


def on_the_model(**more):
    if not os.path.exists(MODEL):
        raise Skipped("needs the host model of CUDA")
    return doctor(program=MODEL, FP4D_MODEL_GPUS="2", **more)


def test_one_process():
    out = doctor().expect(DONE, r"^ok +program +fp4d ", r"(?m)^ok +host +\d+ processors", r"(?m)^ok +cpu +backend cpu computes right",
                          r"(?m)^(absent|ok) +(gpu|driver) ", r"(?m)^ok +mpi +one process", r"(?m)^ok +disk .*GB free", r"\n0 problems\n$")
    check(not re.search(r"PROBLEM", out.text), "no problem", out.text)
    check(os.listdir(folder) == [], "nothing stays", str(os.listdir(folder)))


def test_ranks():
    out = doctor(np=2).expect(DONE, r"(?m)^ok +mpi +Open MPI .*2 ranks on 1 host.*; a sum of all ranks")
    check(len(re.findall(r"(?m)^ok +disk", out.text)) == 1, "rank 0 speaks alone", out.text)
    check(os.listdir(folder) == [], "nothing stays", str(os.listdir(folder)))


def test_gpus():
    on_the_model().expect(DONE, r"(?m)^ok +gpu +1: host model, .* reaches 1 of 1 others", r"(?m)^ok +gpu +backend sm90 computes right: GPU 1",
                          r"(?m)^ok +nccl .* joined a world of one, sent to itself, summed, gathered and aborted it", r"\n0 problems\n$")


def test_fabric():
    on_the_model().expect(DONE, r"(?m)^ok +fabric +no NVLink fabric$")
    on_the_model(FP4D_MODEL_FABRIC="4/a9,").expect(
        DONE, r"(?m)^ok +fabric +1 of 2 GPUs in a rack's NVLink fabric, 1 clique$", r"(?m)^WARNING +fabric +GPU 1 is not in the NVLink fabric that others are in",
        r"(?m)^WARNING +fabric +the NVLink fabric tells of degraded bandwidth at GPU 0")


def test_a_library_that_hangs():
    """NCCL does not come back from its abort, nor then MPI from its end: the report is whole, with its code, in time."""
    source, library = os.path.join(folder, "finalize.c"), os.path.join(folder, "finalize.so")
    with open(source, "w") as f:
        f.write("#include <unistd.h>\nint MPI_Finalize(void) { for (;;) pause(); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    for np in (0, 2):
        on_the_model(np=np, FP4D_MODEL_NCCL_STUCK="1", LD_PRELOAD=library if np else "").expect(
            COMMUNICATION, r"(?m)^ok +mpi ", r"(?m)^PROBLEM +nccl +NCCL: its abort takes longer than 3 s", r"(?m)^ok +disk ", r"\n1 problem\n")
    os.remove(source)
    os.remove(library)


def test_folders():
    doctor("absent").expect(SYSTEM, r"PROBLEM +disk +absent: No such file", r"\n1 problem\n$")
    os.makedirs(os.path.join(folder, "other", "fp4d-doctor"))
    doctor("other").expect(SYSTEM, r"PROBLEM +disk .*is there already")
    check(os.path.isdir(os.path.join(folder, "other", "fp4d-doctor")), "it is left alone")
    shutil.rmtree(os.path.join(folder, "other"))
    doctor("one", "two").expect(USAGE)


if __name__ == "__main__":
    if not os.path.exists(PROGRAM):
        sys.exit(f"not ok program: {PROGRAM} is missing; BUILD names the build folder")
    sys.exit(main(globals(), lambda: shutil.rmtree(folder, ignore_errors=True)))
