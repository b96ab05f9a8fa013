#!/usr/bin/env python3
"""Targets that do not count, unequally many on each rank: the loss is their sum over their number.

BUILD names the build folder (default build); `make worlds` has made the program, fp4d with masked targets
(tests/trainer_masked_main.c).  Prints "ok NAME" or "not ok NAME: why"; exit status 0 iff all are ok.
Arguments: names of tests to run (default all).

A rank of two holds the first or the second half of each update's samples.
"""
import os
import sys

from fp4d import BATCH, BUILD, DATA, DONE, SEQ, Place, check, main, near

place = Place(program=os.path.join(BUILD, "tests", "trainer_masked_main"))


def masked(name, mask, np, route="fp32", **more):
    """Its update records."""
    settings = {"route": route, "train.param_dtype": "fp32" if route == "fp32" else "bf16", "data.validation": "", **more}
    place.train(name, settings, np, environment={"FP4D_TEST_MASK": mask}).expect(DONE)
    return place.updates(name)


def numbers(records, key):
    return [float(r[key]) for r in records]


def worlds(mask, targets, route, tolerance):
    alone = masked(f"alone-{route}-{mask}", mask, 0, route)
    check(abs(alone[0]["targets"] / (BATCH * SEQ) - targets) < 0.03, f"{alone[0]['targets']} targets of {BATCH * SEQ}")
    for np, local_batch in ((2, 4), (2, 1), (4, 2), (0, 8)):
        name = f"{np}-{local_batch}-{route}-{mask}"
        records = masked(name, mask, np, route, **{"train.local_batch": local_batch})
        for key in ("batch_hash", "targets"):
            check([r[key] for r in records] == [r[key] for r in alone], f"{name}: {key}")
        near(numbers(records, "loss")[:1], numbers(alone, "loss")[:1], 1e-6, f"{name}: first loss")
        near(numbers(records, "grad_norm")[:1], numbers(alone, "grad_norm")[:1], 1e-5, f"{name}: first gradient norm")
        near(numbers(records, "loss"), numbers(alone, "loss"), tolerance, f"{name}: loss")
        near(numbers(records, "grad_norm"), numbers(alone, "grad_norm"), 20 * tolerance, f"{name}: gradient norm")


def test_a_tenth_of_rank_0(): worlds("10 0", 0.95, "fp32", 1e-5)
def test_most_of_rank_0(): worlds("90 0", 0.55, "fp32", 1e-5)
def test_all_of_rank_1(): worlds("0 100", 0.5, "fp32", 1e-5)
def test_a_tenth_of_rank_0_bf16(): worlds("10 0", 0.95, "bf16", 2e-3)
def test_most_of_rank_0_mxfp4(): worlds("90 0", 0.55, "mxfp4-row-sr", 5e-3)


def test_sum_over_number():
    """From each half alone: loss = sum nll / sum targets; the mean of the ranks' means is far from it."""
    first, second = masked("first", "90 100", 2)[0], masked("second", "100 0", 2)[0]
    both = masked("both", "90 0", 2)[0]
    check(first["targets"] + second["targets"] == both["targets"], "the halves' targets")
    nll = [float(r["loss"]) * r["targets"] for r in (first, second)]
    near([float(both["loss"])], [sum(nll) / both["targets"]], 1e-6, "sum over number")
    mean_of_means = (float(first["loss"]) + float(second["loss"])) / 2
    check(abs(mean_of_means / float(both["loss"]) - 1) > 1e-4, f"a mean of means would show: {mean_of_means} and {both['loss']}")


def test_no_target_at_all():
    place.train("none", {"data.validation": ""}, 2, environment={"FP4D_TEST_MASK": "100 100"}).expect(
        DATA, r"error: update 1 has no target token to learn from")


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
