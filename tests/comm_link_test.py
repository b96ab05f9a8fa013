#!/usr/bin/env python3
"""Exchanges between devices over NCCL: bits, order beside the device's operations, faults.

`make check` runs it on the host model of CUDA and its double of NCCL, several ranks under mpirun;
`make check-gpu` with GPU=1 on this machine's GPUs: alone, and under mpirun where there are several.
BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why" for each test;
exit status 0 iff all are ok.  Arguments: names of tests to run (default all).
"""
import os
import re
import subprocess
import sys

from comm_worlds import Worlds
from fp4d import BUILD, COMMUNICATION, DEVICE, SOON, Skipped, check, main

GPU = bool(os.environ.get("GPU"))
worlds = Worlds(os.path.join(BUILD, *([] if GPU else ["model"]), "tests", "comm_link_main"), alone=True, FP4D_MODEL_GPUS="4", NCCL_NVLS_ENABLE="0")
world, ended = worlds.run, worlds.ended


def gpus():
    if not GPU:
        return 4
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    except OSError:
        return 1


def exchanges(np, **more):
    if np > gpus():
        raise Skipped(f"needs {np} GPUs")
    worlds.exchanges(np, **more)


def test_exchanges_1(): exchanges(1)
def test_exchanges_2(): exchanges(2)
def test_exchanges_4(): exchanges(4)


def test_nothing_is_done_before_it_is_waited_for():
    """The model's streams put everything off: an order that was not asked for would show."""
    on_the_model()
    for np in (1, 2, 3):
        exchanges(np, FP4D_MODEL_STREAMS="lazy")


def found(defect, np=3, **more):
    """A defect of this transport is wrong bits, or the double of NCCL ends the process."""
    code, text, _ = world(np, "exchange", DEFECT=defect, FP4D_MODEL_STREAMS="lazy", **more)
    check(code != 0 and ("not ok" in text or "cuda model" in text), f"{defect} is not seen: exit code {code}", text)
    return text


def test_hello():
    """What `fp4d doctor` asks of NCCL."""
    for streams in ("", "lazy"):
        code, text, _ = world(1, "hello", FP4D_MODEL_STREAMS=streams)
        check(code == 0, f"exit code {code}", text)


def test_a_hello_that_hangs():
    """The step that the library does not come back from, or does not end, is said; a failure before an abort that hangs, too."""
    on_the_model()
    for defect, more, words in (("stuck-call", {}, r"NCCL: a send to itself takes longer than 2 s \(NCCL_DEBUG"),
                                ("busy", {}, r"NCCL: joining a world of one takes longer than 2 s \(NCCL_DEBUG"),
                                ("stuck-abort", {}, r"NCCL: its abort takes longer than 3 s \(NCCL_DEBUG"),
                                ("stuck-abort", {"FP4D_MODEL_NCCL_ERROR": "0/0"},
                                 r"its abort takes longer than 3 s, after: NCCL: asynchronous error: remote process exited"),
                                ("none", {"FP4D_MODEL_NCCL_ERROR": "0/0"}, r"error: NCCL: asynchronous error: remote process exited")):
        code, text, seconds = world(1, "hello", DEFECT=defect, **more)
        check(code == COMMUNICATION and seconds < SOON, f"{defect}: exit code {code} after {seconds:.1f} s", text)
        check(re.search(words, text), f"{defect}: what and how long", text)


def on_the_model():
    if GPU:
        raise Skipped("on the host model")


def test_defects_of_order_are_found():
    """An event that is not recorded, a wait that is left out."""
    on_the_model()
    for defect in ("no-ready", "no-begin", "no-follow"):
        found(defect)


def test_defects_of_sums_are_found():
    on_the_model()
    for defect in ("one-sum-less", "sum-offset", "order"):
        found(defect)


def test_defects_of_calls_are_found():
    on_the_model()
    check(re.search(r"NCCL: rank \d gives rank \d message \d+, .* which is taken for", found("count")), "what the two sides do not have alike")
    found("gather-offset", np=2)
    check("while an earlier call is in progress" in found("no-look", np=2), "calls follow each other without a look")


def test_two_ranks_on_one_gpu():
    on_the_model()
    code, text, seconds = world(3, "exchange", DEFECT="one-gpu")
    check(code == DEVICE and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)
    check("ranks 0 and 1 have one GPU (GPU-1)" in text and "CUDA_VISIBLE_DEVICES" in text, "which ranks, and what to do", text)


def test_an_error_of_the_library():
    """Of one rank, between calls: said with rank, operation and update, wherever its thread stands."""
    on_the_model()
    text = ended(3, "train", 9, FP4D_MODEL_NCCL_ERROR="8/1")
    check(re.search(r"rank 1 (waiting )?in '(backward|optimizer)' of update \d: NCCL: asynchronous error: remote process exited", text), "whose error", text)


def test_a_fault_of_the_device():
    """Sticky, of one rank's device, which the exchanges' thread meets: by its events, or by the library that only says that
    a call of its failed.  It is the device's, by code and words, whether the caller's thread comes for it or not."""
    on_the_model()
    for told in (False, True):
        after = lambda groups: {"FP4D_MODEL_FAULT": f"{groups}/1", **({"FP4D_MODEL_NCCL_ERROR": f"{groups}/1"} if told else {})}
        text = ended(3, "train", 9, code=DEVICE, **after(8))
        check(re.search(r"GPU 1: .*an illegal memory access", text) and "NCCL" not in text, "the device's fault", text)
        text = ended(3, "away", 1, code=DEVICE, **after(18))
        check(re.search(r"\[r1\] error: rank 1 in 'backward' of update 7: GPU 1: .*an illegal memory access", text) and "NCCL" not in text,
              "place and fault", text)


def test_a_call_that_hangs():
    """NCCL does not come back from a call: the watchdog says where, aborts and leaves.  On a GPU the
    exchange before it may be the one that is named: what would see its end stands in the call."""
    number = "[67]" if GPU else "7"
    for np, victim in ((1, 0),) if GPU else ((1, 0), (3, 2)):
        text = ended(np, "stall-call", victim)
        check(re.search(rf"rank 0 has (had its exchange {number} under way|been waiting in 'optimizer' of update 7) for \d+\.\d s \(limit 2 s\)", text),
              "exchange, operation and update", text)


def test_a_device_that_stalls():
    """The device does not come to the exchange: work before it takes longer than the limit."""
    if not GPU:
        raise Skipped("on a GPU (make check-gpu)")
    text = ended(1, "stall-device", 0)
    check(re.search(r"rank 0 has had its exchange 7 under way for \d+\.\d s \(limit 2 s\) in 'optimizer' of update 7, and its device has not come to it", text),
          "exchange, operation and update", text)


if __name__ == "__main__":
    sys.exit(main(globals()))
