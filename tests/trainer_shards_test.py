#!/usr/bin/env python3
"""Worlds of ranks that share gradients, moments and master by rows, seen from outside.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import os
import re
import sys

from fp4d import DONE, PREEMPTED, Place, check, main, near, same, words

place = Place(**{"train.global_batch": 12, "train.local_batch": 1, "train.updates": 6})

CASES = {"plain": {"route": "bf16"},
         "bf16-gradients": {"route": "bf16", "train.gradient_dtype": "bf16"},
         "no-master": {"route": "mxfp4-row-sr", "train.master": False, "train.gradient_dtype": "bf16"},
         "tied": {"route": "bf16", "model.tied": True},
         "odd": {"route": "bf16", "model.hidden_size": 60, "model.ffn_size": 100, "model.vocab_size": 259},
         "fp32": {"route": "fp32", "train.param_dtype": "fp32"}}


def in_worlds(case, tolerance):
    """The same samples and nearly the same losses in every world; in one world the same bits twice."""
    settings = CASES[case]
    alone = f"{case}-0"
    place.run(alone, settings)
    for np in (2, 3, 4):
        name = f"{case}-{np}"
        place.run(name, settings, np)
        check(place.column(name, "batch_hash") == place.column(alone, "batch_hash"), f"{name}: the same samples")
        near(place.column(name, "loss"), place.column(alone, "loss"), tolerance, f"{name}: loss")
        near(place.column(name, "grad_norm"), place.column(alone, "grad_norm"), 20 * tolerance, f"{name}: norm")
        inits = {line["init_hash"] for n in (alone, name) for line in place.lines(n, "start")}
        check(len(inits) == 1, f"{name}: the same initial parameters", str(inits))
    name = f"{case}-3-again"
    place.run(name, settings, 3)
    same(place.updates(f"{case}-3"), place.updates(name), "the same world twice")
    same(place.tensors(f"{case}-3", 6), place.tensors(name, 6), "the same world twice, tensors")


def test_worlds(): in_worlds("plain", 2e-3)
def test_worlds_bf16_gradients(): in_worlds("bf16-gradients", 4e-3)
def test_worlds_no_master(): in_worlds("no-master", 1e-2)
def test_worlds_tied(): in_worlds("tied", 2e-3)
def test_worlds_odd(): in_worlds("odd", 2e-3)
def test_worlds_fp32(): in_worlds("fp32", 1e-5)


def stop_at(name, update, settings, np):
    place.train(name, {**settings, "run.stop_after_update": update}, np).expect(PREEMPTED)


def test_resume():
    """To the bit in the same world, of whatever a rank holds."""
    for case, np in (("bf16-gradients", 3), ("no-master", 4), ("odd", 4), ("tied", 3)):
        whole, name = f"resume-{case}", f"resume-{case}-stopped"
        place.run(whole, CASES[case], np)
        stop_at(name, 4, CASES[case], np)
        place.run(name, CASES[case], np)
        same(place.updates(whole), place.updates(name), name)
        same(place.tensors(whole, 6), place.tensors(name, 6), name + ", tensors")


def test_resume_across_worlds():
    """1 -> 4 -> 3 -> 1 ranks."""
    for case, tolerance in (("fp32", 1e-5), ("odd", 2e-3)):
        whole, name = f"across-{case}-whole", f"across-{case}"
        place.run(whole, CASES[case])
        for update, np in ((1, 0), (3, 4), (5, 3)):
            stop_at(name, update, CASES[case], np)
        place.run(name, CASES[case])
        check(place.column(name, "batch_hash") == place.column(whole, "batch_hash"), "the same samples")
        near(place.column(name, "loss"), place.column(whole, "loss"), tolerance, f"{name}: loss")


def test_files():
    """A rank's file holds the rows that it owns: what `reshard` cuts for as many ranks."""
    for case in ("plain", "odd"):
        name = f"files-{case}"
        place.run(name, {**CASES[case], "train.updates": 2, "optimizer.warmup_updates": 0}, 3)
        step, cut = place.step(name, 2), place.at(name + "-cut")
        place.command("reshard", step, cut, "--ranks", "3").expect(DONE)
        for r in range(3):
            lists = [sorted(re.findall(r"^.*layers\.\d+\..*$|^.*(?:embeddings|norm|output)\.weight.*$",
                                       place.command("inspect", os.path.join(folder, f"rank-{r:05d}.h5")).expect(DONE).text, re.M))
                     for folder in (step, cut)]
            same(lists[0], lists[1], f"{name}: rank {r}")


def test_memory():
    """What a rank takes is what `plan` says of that many."""
    for case in ("plain", "no-master"):
        name = f"memory-{case}"
        place.run(name, {**CASES[case], "train.updates": 1, "optimizer.warmup_updates": 0}, 2)
        out = place.command("plan", "tiny.yaml", "--gpus", "2", *words(CASES[case])).expect(DONE, r"memory of one rank of 2, its share of moments and master")
        memory = place.lines(name, "start")[0]["memory_bytes"]
        check(memory["adam_m"] < 0.51 * memory["gradients"] * (1 if case == "plain" else 2), "half of the moments", str(memory))
        for category, size in memory.items():
            if size and category != "checkpoint_staging":
                check(re.search(rf"^  {category.replace('_', '[_ ]')} +{size / 1e6:.3f} MB", out.text, re.M), f"{name}: {category} {size}", out.text)


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
