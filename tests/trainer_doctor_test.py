#!/usr/bin/env python3
"""`fp4d doctor`: what it says of a machine without a GPU, alone and under mpirun, and of folders it cannot use.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"
for each test; exit status 0 iff all are ok.
"""
import os
import re
import shutil
import sys
import tempfile

from fp4d import DONE, PROGRAM, SYSTEM, USAGE, Job, check, launcher, main

folder = tempfile.mkdtemp(prefix="fp4d-doctor-")


def doctor(*words, np=0):
    return Job(launcher(np) + ["doctor", *words], folder).end()


def test_one_process():
    out = doctor().expect(DONE, r"^ok +program +fp4d ", r"(?m)^ok +host +\d+ processors", r"(?m)^ok +cpu +backend cpu computes right",
                          r"(?m)^(absent|ok) +(gpu|driver) ", r"(?m)^ok +mpi +one process", r"(?m)^ok +disk .*GB free", r"\n0 problems\n$")
    check(not re.search(r"PROBLEM", out.text), "no problem", out.text)
    check(os.listdir(folder) == [], "nothing stays", str(os.listdir(folder)))


def test_ranks():
    out = doctor(np=2).expect(DONE, r"(?m)^ok +mpi +Open MPI .*2 ranks on 1 host.*; a sum of all ranks")
    check(len(re.findall(r"(?m)^ok +disk", out.text)) == 1, "rank 0 speaks alone", out.text)
    check(os.listdir(folder) == [], "nothing stays", str(os.listdir(folder)))


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
