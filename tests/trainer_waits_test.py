#!/usr/bin/env python3
"""Copies to and from the device go on beside the host: nothing is read or written too early, and nobody waits
for the device more often than an update needs.

BUILD names the build folder (default build); `make worlds` has made the program, fp4d on a device whose copies
end no earlier than they must (tests/trainer_waits_main.c).  Prints "ok NAME" or "not ok NAME: why"; exit status
0 iff all are ok.  Arguments: names of tests to run (default all).
"""
import os
import re
import sys

from fp4d import BUILD, DEVICE, DONE, PROGRAM, Place, check, main, same

place = Place(program=os.path.join(BUILD, "tests", "trainer_waits_main"))
ALONE = {"data.validation": "", "checkpoint.at_end": False, "train.local_batch": 1}


def waits(name, settings, np):
    """Of each rank of a run."""
    out = place.run(name, settings, np)
    found = [int(n) for n in re.findall(r"the host waited (\d+) times", out.text)]
    check(len(found) == max(np, 1), "every rank tells", out.text)
    return found


def test_two_waits_an_update():
    """However many micro-batches it has: one before the update is judged, one after the optimizer."""
    for np in (0, 2):
        for route in ("bf16", "attention-fp8-proj-nvfp4"):
            few, many = (waits(f"{np}-{route}-{n}", {**ALONE, "route": route, "train.updates": n}, np) for n in (3, 8))
            check([b - a for a, b in zip(sorted(few), sorted(many))] == [5 * 2] * max(np, 1), "waits of 5 updates", f"{few}, {many}")


def test_memory_is_taken_at_the_start():
    """However many updates, validations and saves follow, and under a resume as under a start."""
    for np in (0, 2):
        asked = set()
        for n in (1, 7, 9):  # the last goes on from the seventh
            settings = {"train.updates": n, "optimizer.warmup_updates": 0, "validation.every": 1, "checkpoint.every": 2}
            out = place.run(f"memory-{np}-{min(n, 7)}", settings, np)
            asked.update(re.findall(r"asked for memory (\d+) times", out.text))
        check(len(asked) == 1 and int(asked.pop()) > 0, "memory was asked for as often", out.text)


def test_skipped_updates():
    """One that is not applied needs the first wait alone; planting the fault is another."""
    skips = {**ALONE, "divergence.nonfinite": "skip", "train.updates": 8}
    plain, skipped = waits("applied", skips, 0), waits("skipped", {**skips, "fault": "nan@5"}, 0)
    check(skipped == plain, "waits", f"{plain}, {skipped}")


def test_the_same_run():
    """With validation, checkpoints, documents and a resume: every record and tensor of the program itself."""
    settings = {"validation.every": 3, "checkpoint.every": 4, "data.attention": "document", "train.local_batch": 2, "route": "mxfp4-row-sr"}
    program = Place(program=PROGRAM)
    for np in (0, 2):
        place.run(f"late-{np}", settings, np)
        program.run(f"early-{np}", settings, np)
        same(program.updates(f"early-{np}"), place.updates(f"late-{np}"), "records")
        same(program.tensors(f"early-{np}", 12), place.tensors(f"late-{np}", 12), "tensors")
        place.train(f"resumed-{np}", {**settings, "run.stop_after_update": 5}, np)
        place.run(f"resumed-{np}", settings, np)
        same(place.updates(f"late-{np}"), place.updates(f"resumed-{np}"), "resumed")
    program.close()


def test_a_fault_at_every_wait():
    """Of the device, found at any synchronisation of a run: its exit code, said once, whatever the run was doing."""
    settings = {"validation.every": 1, "checkpoint.every": 1, "train.updates": 2, "optimizer.warmup_updates": 0, "train.local_batch": 2}
    for np, rank, step in ((0, 0, 1), (2, 1, 13)):
        least = min(waits(f"whole-{np}", settings, np))
        for n in range(1, least + 1, step):
            out = place.train(f"fault-{np}-{n}", settings, np, environment={"FP4D_TEST_FAULT": f"{rank} {n}"}).expect(DEVICE, "error: .*the device is in a fault")
            check(len(re.findall("error: ", out.text)) == 1, "said once", out.text)


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
