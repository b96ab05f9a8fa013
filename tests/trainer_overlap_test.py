#!/usr/bin/env python3
"""What ranks exchange goes on beside the computation: begun and waited for where it can be, by all ranks in one order.

BUILD names the build folder (default build); `make worlds` has made the program, fp4d that writes down what it
computes and exchanges (tests/trainer_overlap_main.c).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import os
import re
import sys

from fp4d import BUILD, COMMUNICATION, DIVERGED, DONE, PREEMPTED, SOON, Place, check, main

place = Place(program=os.path.join(BUILD, "tests", "trainer_overlap_main"), **{"train.updates": 4, "optimizer.warmup_updates": 1})
LAYERS, BLOCK = 2, 9  # and parameters of a block
QUIET = {"data.validation": "", "checkpoint.at_end": False, "train.global_batch": 12, "train.local_batch": 2}


def passes(accumulation, tied=False, again=False):
    """Forwards and backwards of an update: waits in the first forward, sums from the last backward on."""
    head, text = 1 if tied else 2, ""
    for number in range(1, accumulation + 1):
        w = "w" if number == 1 else ""
        text += w + "E" + (w + "f") * LAYERS + w + "h"
        sums = number == accumulation
        text += f"S{head}" if sums else ""
        for _ in range(LAYERS):
            text += ("f" if again else "") + "b" + (f"S{BLOCK}" if sums else "")
        text += "eS1W" if sums else "e"
    return text


def optimizer(tied=False):
    return "oC1" + f"oC{BLOCK}" * LAYERS + f"oC{1 if tied else 2}"


SETTLED = "w" * (LAYERS + 2)


def traces(out, np):
    found = re.findall(r"trace (\d): (\S*)\n", out.text)
    check(sorted(int(rank) for rank, _ in found) == list(range(np)), "every rank tells", out.text)
    return [text for _, text in found]


def as_expected(out, np, expected):
    for text in traces(out, np):
        check(text == expected, f"what a rank did:\n{text}\nexpected:\n{expected}")


def test_beside_the_computation():
    for np, local in ((2, 2), (2, 6), (3, 2)):
        out = place.run(f"plain-{np}-{local}", {**QUIET, "train.local_batch": local}, np)
        as_expected(out, np, (passes(12 // np // local) + optimizer()) * 4 + SETTLED)


def test_tied_packed_and_recomputed():
    settings = {**QUIET, "model.tied": True, "route": "mxfp4-row-sr", "train.recompute": "all", "train.master": False}
    out = place.run("tied", settings, 2)
    as_expected(out, 2, (passes(3, tied=True, again=True) + optimizer(tied=True)) * 4 + SETTLED)


def test_before_parameters_are_read():
    """A validation and a checkpoint come after the copies."""
    out = place.run("read", {**QUIET, "data.validation": "validation.tokens", "validation.every": 2, "train.updates": 3, "checkpoint.every": 1}, 2)
    update, validation = passes(3) + optimizer(), SETTLED + "E" + "f" * LAYERS + "h"
    as_expected(out, 2, update + SETTLED + update + validation + SETTLED + update + validation + 2 * SETTLED)


def test_one_order_after_a_failure():
    """What is wrong on one rank alone keeps none from an exchange: gradients that are not finite, a save that fails."""
    for rank in (0, 1):
        skips = {**QUIET, "divergence.nonfinite": "skip", "fault": f"nan@2/{rank}"}
        out = place.train(f"skip-{rank}", skips, 2).expect(DONE, "update 2 skipped")
        as_expected(out, 2, passes(3) + optimizer() + passes(3) + (passes(3) + optimizer()) * 2 + SETTLED)
    out = place.train("halt", {**QUIET, "fault": "nan@3/1"}, 3).expect(DIVERGED)
    as_expected(out, 3, (passes(2) + optimizer()) * 2 + passes(2))
    out = place.train("unsaved", {**QUIET, "checkpoint.every": 2, "fault": "save-error@2/1"}, 2).expect(DONE, "update 2: checkpoint not saved")
    as_expected(out, 2, ((passes(3) + optimizer()) * 2 + SETTLED) * 2 + SETTLED)


def stopped(number, where):
    """Rank 1 is stopped beside its exchange of this number."""
    out = place.train(f"stop-{number}", {**QUIET, "limits.heartbeat_s": 2.5}, 2, environment={"FP4D_TEST_STOP": f"1 {number}"})
    out.expect(COMMUNICATION, rf"\[r0\] error: rank 1 has been silent for \d+\.\d s in '{where}' of update 2; ending the job")
    check(out.seconds < SOON, f"{out.seconds:.1f} s", out.text)


AN_UPDATE = 2 * (LAYERS + 2)  # exchanges


def test_stopped_beside_a_sum(): stopped(AN_UPDATE + 2, "backward")
def test_stopped_beside_a_copy(): stopped(AN_UPDATE + LAYERS + 2 + 2, "optimizer")


def held(number, where, update):
    """The exchange of this number never ends, and no rank is at fault but that it waits."""
    limits = {"limits.heartbeat_s": 2.5, "limits.update_s": 3}
    out = place.train(f"hold-{number}", {**QUIET, **limits}, 2, environment={"FP4D_TEST_HOLD": f"1 {number}"})
    out.expect(COMMUNICATION, rf"error: rank [01] has been waiting in '{where}' of update {update} for \d+\.\d s \(limit 3 s\), as have all other ranks; ending")
    check(out.seconds < SOON, f"{out.seconds:.1f} s", out.text)


def test_held_sum(): held(AN_UPDATE + 2, "reduce gradients", 2)
def test_held_after_a_resume():
    """The first update after one has a start's limit: it loads and connects as much."""
    limits = {"limits.heartbeat_s": 2.5, "limits.start_s": 4, "limits.update_s": 2}
    place.train("hold-resumed", {**QUIET, "run.stop_after_update": 1}, 2).expect(PREEMPTED)
    out = place.train("hold-resumed", {**QUIET, **limits}, 2, environment={"FP4D_TEST_HOLD": "1 2"})
    out.expect(COMMUNICATION, r"in 'reduce gradients' of update 2 for \d+\.\d s \(limit 4 s\)")


def slow_validation(name, seconds, **limits):
    """Of rank 1, after the second update, whose micro-batches are forwards 4 to 6."""
    settings = {**QUIET, "data.validation": "validation.tokens", "train.updates": 2, "limits.heartbeat_s": 2.5, **limits}
    return place.train(name, settings, 2, environment={"FP4D_TEST_SLOW": f"1 7 {seconds}"})


def test_a_validation_has_a_saves_limit():
    """Longer than an update may take, it goes on; longer than a save may, it is named with its limit."""
    slow_validation("slow", 6, **{"limits.update_s": 2}).expect(DONE, "update      2  validation loss")
    out = slow_validation("slower", 300, **{"limits.save_s": 2})
    out.expect(COMMUNICATION, r"\[r0\] error: rank 1 has been in 'validation' of update 2 for \d+\.\d s \(limit 2 s\); elsewhere: rank 0 waiting in 'validation' of update 2")
    check(out.seconds < SOON, f"{out.seconds:.1f} s", out.text)


def test_held_copy(): held(AN_UPDATE + LAYERS + 2 + 2, "gather weights", 3)


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
