#!/usr/bin/env python3
"""Exchanges that go on beside the caller's work, in worlds under mpirun: bits, order, lost and stalled ranks.

BUILD names the build folder (default build); `make worlds` has made the program.
Prints "ok NAME" or "not ok NAME: why" for each test; exit status 0 iff all are ok.
Arguments: names of tests to run (default all).
"""
import os
import re
import signal
import sys

from comm_worlds import Worlds
from fp4d import BUILD, DATA, SOON, check, main

worlds = Worlds(os.path.join(BUILD, "tests", "comm_exchange_main"))
world, exchanges, ended = worlds.run, worlds.exchanges, worlds.ended


def test_exchanges_1(): exchanges(1)
def test_exchanges_2(): exchanges(2)
def test_exchanges_3(): exchanges(3)
def test_exchanges_4(): exchanges(4)


def test_through_other_memory():
    """Messages that MPI cuts into fragments, where it cannot read another process' memory."""
    exchanges(3, OMPI_MCA_btl_vader_single_copy_mechanism="none")


def test_stopped_rank():
    """Stopped while its exchange is under way, which the others wait for."""
    for victim in (0, 2):
        text = ended(3, "stop", victim)
        judge = 1 if victim == 0 else 0
        check(re.search(rf"\[r{judge}\] error: rank {victim} has been silent for \d+\.\d s in 'backward' of update 7; ending the job", text),
              "rank, operation and update", text)


def test_stalled_rank():
    """One that does not come to the exchange holds up those that wait for it."""
    for victim in (0, 1):
        text = ended(3, "stall", victim)
        check(re.search(rf"rank {victim} has been in 'backward' of update 7 for \d+\.\d s \(limit 2 s\); "
                        r"elsewhere: 2 ranks waiting in 'reduce gradients' of update 7", text), "who waits for whom", text)


def test_killed_rank():
    for np, victim in ((3, 1), (2, 0)):
        code, text, seconds = world(np, "kill", victim)
        check(code == 128 + signal.SIGKILL and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)


def test_abort_of_one_rank():
    code, text, seconds = world(3, "abort", 1)
    check(code == DATA and seconds < SOON, f"exit code {code} after {seconds:.1f} s", text)


def test_another_order():
    text = ended(2, "disorder", 1)
    check(re.search(r"ranks do not exchange the same: rank [01] begins an? (reduce-scatter|all-gather) of 1 tensors as its exchange 7, "
                    r"rank [01] an? (reduce-scatter|all-gather) of 1 as its 7\n", text), "who begins what", text)
    check("forgotten" not in text, "it is reported again", text)


def test_another_shape():
    text = ended(3, "shape", 1)
    check(re.search(r"ranks do not exchange the same: .* as its 7, of other shapes", text), "shapes", text)


if __name__ == "__main__":
    sys.exit(main(globals()))
