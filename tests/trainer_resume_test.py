#!/usr/bin/env python3
"""Stopping, resuming, and what must not change a run: seen from outside, to the bit.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import functools
import json
import os
import re
import shutil
import sys

from fp4d import (BATCH, CHECKPOINT, CONFIG, DATA, DEVICE, DONE, PREEMPTED, ROOT, SEQ, Place, Skipped, built_in_routes, check, main, near,
                  route_settings, same, words)

ROUTES = {"fp32": {"route": "fp32", "train.param_dtype": "fp32"},
          "bf16": {"route": "bf16"},
          "mxfp4": {"route": "mxfp4-row-sr"},
          "attention-fp8": {"route": "attention-fp8-proj-nvfp4"},
          "attention-mxfp4": {"route": "attention-mxfp4-proj-e4m3"},
          "mxfp4-no-master": {"route": "mxfp4-row-sr", "train.master": False},
          "bf16-no-master": {"route": "bf16", "train.master": False},
          "bf16-gradients": {"route": "mxfp4-row-sr", "train.gradient_dtype": "bf16"}}

place = Place()
whole_runs = {}


def whole(route, np, **more):
    """The name of an uninterrupted run, made once."""
    key = (route, np, json.dumps(more, sort_keys=True))
    if key not in whole_runs:
        whole_runs[key] = f"whole-{len(whole_runs)}"
        place.run(whole_runs[key], {**ROUTES[route], **more}, np)
    return whole_runs[key]


def same_run(a, b, update, what):
    """Two runs that ended at `update`: every record and every tensor."""
    same(place.updates(a), place.updates(b), what)
    same(place.lines(a, "validation")[-1]["loss"], place.lines(b, "validation")[-1]["loss"], what + ", validation loss")
    same(place.tensors(a, update), place.tensors(b, update), what + ", tensors")
    for window in ("loss_window", "grad_norm_window"):
        same(place.meta(a, update)[window], place.meta(b, update)[window], what + ", " + window)


def stop_at(name, update, settings, np):
    place.train(name, {**settings, "run.stop_after_update": update}, np).expect(
        PREEMPTED, rf"stopped on request after update {update} of ")


# ---- resume equals never having stopped -------------------------------------


def resumed(route, np):
    """Update 6 ends the first epoch, so this also resumes inside a shuffled second one."""
    check(place.epoch_samples() == 6 * BATCH, "an epoch is 6 updates")
    name = f"resumed-{route}-{np}"
    stop_at(name, 7, ROUTES[route], np)
    check(place.steps(name) == [7], "one checkpoint")
    place.train(name, ROUTES[route], np).expect(DONE, r"resumed from .*step-00000007 at update 7")
    same_run(whole(route, np), name, 12, "resumed at 7 of 12")
    check([r["update"] for r in place.lines(name, "start")] == [0, 7], "two starts on record")


def test_resume_fp32(): resumed("fp32", 0)
def test_resume_bf16(): resumed("bf16", 0)
def test_resume_mxfp4(): resumed("mxfp4", 0)
def test_resume_bf16_no_master(): resumed("bf16-no-master", 0)
def test_resume_mxfp4_no_master(): resumed("mxfp4-no-master", 0)
def test_resume_bf16_gradients(): resumed("bf16-gradients", 0)
def test_resume_fp32_2(): resumed("fp32", 2)
def test_resume_bf16_2(): resumed("bf16", 2)
def test_resume_mxfp4_2(): resumed("mxfp4", 2)
def test_resume_mxfp4_no_master_2(): resumed("mxfp4-no-master", 2)
def test_resume_bf16_gradients_2(): resumed("bf16-gradients", 2)
def test_resume_attention_fp8_2(): resumed("attention-fp8", 2)
def test_resume_attention_mxfp4_2(): resumed("attention-mxfp4", 2)


def resumed_twice(np):
    settings = {**ROUTES["mxfp4"], "train.updates": 15}
    name = f"twice-{np}"
    stop_at(name, 5, settings, np)
    stop_at(name, 10, settings, np)
    place.train(name, settings, np).expect(DONE, r"at update 10\n")
    same_run(whole("mxfp4", np, **{"train.updates": 15}), name, 15, "5 + 5 + 5")


def test_resume_twice(): resumed_twice(0)
def test_resume_twice_2(): resumed_twice(2)


def test_resume_after_every_update():
    """Twelve starts; the window of the divergence detector (4) wraps on the way."""
    settings = {**ROUTES["bf16"], "divergence.window": 4}
    for update in range(1, 12):
        stop_at("each", update, settings, 0)
    place.run("each", settings)
    same_run(whole("bf16", 0, **{"divergence.window": 4}), "each", 12, "stopped after each update")


def continues(name, settings, np, tolerance, reference):
    """Another shape of the same global batch: the same samples, nearly the same losses."""
    place.run(name, settings, np)
    check(place.column(name, "batch_hash") == place.column(reference, "batch_hash"), f"{name}: the same samples")
    near(place.column(name, "loss"), place.column(reference, "loss"), tolerance, f"{name}: loss")
    near(place.column(name, "grad_norm"), place.column(reference, "grad_norm"), 20 * tolerance, f"{name}: norm")


def test_resume_at_another_local_batch():
    for route, tolerance in (("fp32", 1e-5), ("bf16", 2e-3)):
        for update, local_batch in ((5, 8), (7, 1), (7, 4)):
            name = f"local-{route}-{update}-{local_batch}"
            stop_at(name, update, ROUTES[route], 0)
            continues(name, {**ROUTES[route], "train.local_batch": local_batch}, 0, tolerance, whole(route, 0))


def test_resume_in_another_world():
    stop_at("world", 7, ROUTES["fp32"], 2)
    stop_at("world-bf16", 7, ROUTES["bf16"], 2)
    for np in (0, 1, 4):
        for source, route, tolerance in (("world", "fp32", 1e-5), ("world-bf16", "bf16", 2e-3)):
            name = f"{source}-{np}"
            shutil.copytree(place.at(source), place.at(name), symlinks=True)
            continues(name, ROUTES[route], np, tolerance, whole(route, 2))
    # The restored parameters are the same bits, however many ranks read them.
    evaluated = set()
    for np in (0, 2, 4):
        out = place.command("eval", place.step("world", 7), "tiny.yaml", *("--set", "train.local_batch=1"),
                            "--set", "route=fp32", "--set", "train.param_dtype=fp32", "--json", f"eval-{np}.json", np=np).expect(DONE)
        with open(place.at(f"eval-{np}.json")) as f:
            evaluated.add(json.dumps(json.load(f)["sequence_nll"]))
    check(len(evaluated) == 1, "one evaluation in every world", "\n".join(evaluated))
    # Ranks share what is evaluated, not an update: they may be more than its micro-batches, or not divide them.
    for more in ({"train.local_batch": 2}, {"train.local_batch": 8}, {"train.local_batch": 1, "train.accumulation": 4}):
        out = place.command("eval", place.step("world", 7), "tiny.yaml", *words({**ROUTES["fp32"], **more}), "--json", "shared.json", np=3).expect(DONE)
        check("micro-batch" not in out.text, f"{more}: no word about updates", out.text)
        with open(place.at("shared.json")) as f:
            check(json.dumps(json.load(f)["sequence_nll"]) in evaluated, f"{more}: the same evaluation", out.text)


def every_route(route):
    settings = route_settings(route)
    out = place.command("check", "tiny.yaml", *words({**settings, "run.folder": "unused"}))
    if out.code == DEVICE:
        raise Skipped(re.search(r"PROBLEM +route +(.*)", out.text).group(1))
    out.expect(DONE)
    name = f"route-{route}"
    place.run(name, settings)
    stop_at(name + "-resumed", 2, settings, 0)
    place.run(name + "-resumed", settings)
    same_run(name, name + "-resumed", 4, "resumed at 2 of 4")
    place.run(name + "-otherwise", {**settings, "run.threads": 3, "train.recompute": "all"})
    same_run(name, name + "-otherwise", 4, "three threads, recomputed")
    # Before the first update only the order of sums differs between worlds: draws belong to samples.
    place.run(name + "-two", settings, 2)
    alone, two = place.updates(name)[0], place.updates(name + "-two")[0]
    check(alone["batch_hash"] == two["batch_hash"], "the same samples")
    near([float(two["loss"])], [float(alone["loss"])], 1e-6, "first loss of two ranks")
    near([float(two["grad_norm"])], [float(alone["grad_norm"])], 1e-5, "first norm of two ranks")


for name in built_in_routes():
    globals()["test_route_" + name] = functools.partial(every_route, name)


# ---- what must not change a run ---------------------------------------------


def test_repeated():
    for route in ("fp32", "bf16", "mxfp4", "mxfp4-no-master"):
        place.run(f"again-{route}", ROUTES[route])
        same_run(whole(route, 0), f"again-{route}", 12, f"{route}, run again")
    for np in (2, 4):
        place.run(f"again-{np}", ROUTES["mxfp4"], np)
        same_run(whole("mxfp4", np), f"again-{np}", 12, f"{np} ranks, run again")


def test_world_of_one_under_mpirun():
    same_run(whole("mxfp4", 0), whole("mxfp4", 1), 12, "alone and mpirun -np 1")


def test_worlds():
    for route, tolerance in (("fp32", 1e-5), ("bf16", 2e-3)):
        reference = whole(route, 0)
        for np in (2, 4):
            name = whole(route, np)
            check(place.column(name, "batch_hash") == place.column(reference, "batch_hash"), "the same samples")
            near(place.column(name, "loss"), place.column(reference, "loss"), tolerance, f"{route}, {np} ranks: loss")
            near(place.column(name, "grad_norm"), place.column(reference, "grad_norm"), 20 * tolerance, f"{route}, {np} ranks: norm")
    # Draws of stochastic rounding belong to samples, not to ranks: before the first update all is equal.
    first = [place.updates(whole("mxfp4", np))[0] for np in (0, 2, 4)]
    check(len({r["batch_hash"] for r in first}) == 1, "the same samples")
    near([float(r["loss"]) for r in first], [float(first[0]["loss"])] * 3, 1e-6, "mxfp4: first loss")
    near([float(r["grad_norm"]) for r in first], [float(first[0]["grad_norm"])] * 3, 1e-5, "mxfp4: first norm")
    # What is seen is seen on all ranks, not on rank 0's share.
    for key in ("max_attention_logit", "quantised"):
        check(all(r[key] == first[0][key] for r in first), f"mxfp4: {key} of all ranks", str([r[key] for r in first]))
    first = [place.updates(whole("attention-mxfp4", np))[0] for np in (0, 2, 4)]
    for key in ("max_attention_logit", "quantised", "attention"):
        check(all(r[key] == first[0][key] for r in first), f"attention-mxfp4: {key} of all ranks", str([r[key] for r in first]))


def test_bf16_gradients():
    """Accumulated and reduced in BF16: the same samples and nearly the losses of FP32, in every world; said at the start."""
    for np in (0, 2, 4):
        name, reference = whole("bf16-gradients", np), whole("mxfp4", np)
        check(place.column(name, "batch_hash") == place.column(reference, "batch_hash"), "the same samples")
        near(place.column(name, "loss"), place.column(reference, "loss"), 0.02, f"{np} ranks: loss")
        check(place.column(name, "loss")[0] == place.column(reference, "loss")[0], "the first forward is the same")
        norms = [place.column(n, "grad_norm")[0] for n in (name, reference)]
        near(norms[:1], norms[1:], 2e-3, f"{np} ranks: first norm")
        check(norms[0] != norms[1], "but for rounding")
        start = place.lines(name, "start")[0]
        check(any("gradients bf16, moments fp32" in line for line in start["executed"]), "on record", str(start["executed"]))
        near([2 * start["memory_bytes"]["gradients"]], [place.lines(reference, "start")[0]["memory_bytes"]["gradients"]], 1e-3, "half the memory")
    refused = place.command("check", "tiny.yaml", *words({**ROUTES["fp32"], "train.gradient_dtype": "bf16", "run.folder": "unused"}))
    refused.expect(CONFIG, "gradient_dtype bf16: route fp32 computes in fp32 and needs fp32 gradients")
    # No state of a checkpoint: a resume may have either.
    stop_at("either", 5, ROUTES["mxfp4"], 0)
    place.train("either", ROUTES["bf16-gradients"]).expect(DONE, r"train\.gradient_dtype: fp32 -> bf16\n")


def test_threads():
    for route in ("bf16", "mxfp4-no-master", "bf16-gradients"):
        for threads in (2, 3):
            same_run(whole(route, 0), whole(route, 0, **{"run.threads": threads}), 12, f"{route}, {threads} threads")


def test_recompute():
    for route in ("fp32", "bf16", "mxfp4"):
        for more in ({"train.recompute": "all"}, {"train.recompute": "boundaries"}, {"train.recompute": "every-nth"},
                     {"train.recompute": "every-nth", "train.recompute_every": 1}):
            same_run(whole(route, 0), whole(route, 0, **more), 12, f"{route}, {more}")
    again = {"train.recompute": "boundaries"}
    same_run(whole("attention-fp8", 2), whole("attention-fp8", 2, **again), 12, f"attention-fp8, two ranks, {again}")


def test_validation_is_beside():
    """Validating after every update, after some or never: the run is the same."""
    for more in ({"validation.every": 1}, {"validation.every": 5, "validation.samples": 7}, {"data.validation": ""}):
        for np in (0, 2):
            a, b = whole("mxfp4", np), whole("mxfp4", np, **more)
            same(place.updates(a), place.updates(b), f"{more}, {np} ranks")
            same(place.tensors(a, 12), place.tensors(b, 12), f"{more}, {np} ranks: tensors")


def test_checkpoints_are_beside():
    same_run(whole("mxfp4", 0), whole("mxfp4", 0, **{"checkpoint.every": 1}), 12, "a checkpoint after every update")
    check(place.steps(whole("mxfp4", 0, **{"checkpoint.every": 1})) == [10, 11, 12], "the newest three are kept")


def test_frozen_model_validates_to_the_bit():
    settings = {"optimizer.lr": 0, "optimizer.min_lr": 0, "validation.every": 1, "validation.samples": 5}
    losses = set()
    for np in (0, 2):
        name = whole("bf16", np, **settings)
        records = place.lines(name, "validation")
        check(len(records) == 12, "twelve validations")
        losses |= {(r["loss"], r["standard_error"]) for r in records}
    check(len(losses) == 1, "one validation loss", str(losses))
    out = place.command("eval", name, "tiny.yaml", "--set", "validation.samples=5", "--json", "frozen.json").expect(DONE)
    with open(place.at("frozen.json")) as f:
        check(json.load(f, parse_float=str)["loss"] == losses.pop()[0], "eval says the same", out.text)


def test_global_batch_divided():
    """32 x 1, 8 x 4, 4 x 8, two ranks, and three with unequal shares (11, 11, 10; 3, 3, 2; 1, 1, 1 of 3): accumulation scales
    neither loss nor gradient."""
    shape = {"train.global_batch": 32, "train.updates": 4, "train.accumulation": 0}
    reference = whole("fp32", 0, **shape, **{"train.local_batch": 32})
    for np, local_batch in ((0, 8), (0, 4), (0, 1), (2, 4), (3, 1), (3, 4), (3, 8)):
        name = whole("fp32", np, **shape, **{"train.local_batch": local_batch})
        check(place.column(name, "batch_hash") == place.column(reference, "batch_hash"), "the same samples")
        near(place.column(name, "loss"), place.column(reference, "loss"), 2e-6, f"{np} ranks, local batch {local_batch}: loss")
        near(place.column(name, "grad_norm"), place.column(reference, "grad_norm"), 2e-5, f"{np} ranks, local batch {local_batch}: norm")


def test_batch_that_does_not_divide():
    for settings, np in (({"train.local_batch": 3}, 0), ({"train.local_batch": 8}, 2), ({"train.accumulation": 3}, 0), ({"train.accumulation": 1}, 3)):
        place.train("undivided", settings, np).expect(CONFIG, r"global_batch\b.* 8 ")


def test_unequal_shares():
    """Four micro-batches on three ranks are the four of one rank, draws among them; it is said at the start, and a resume in another world goes on."""
    one = whole("mxfp4-no-master", 0)
    out = place.train("unequal", {**ROUTES["mxfp4-no-master"], "run.stop_after_update": 5}, 3).expect(PREEMPTED)
    for said in (r"warning: 4 micro-batches an update over 3 ranks: 1 of them compute 2, the others 1 and wait \(at most 66\.7 %", r"= 2 local x 1 to 2 accumulated x 3 ranks"):
        check(re.search(said, out.text), said, out.text)
    check(place.lines("unequal", "start")[0]["accumulation"] == 2, "the most")
    place.run("unequal", ROUTES["mxfp4-no-master"], 2)
    for key in ("batch_hash", "tokens", "targets"):
        same(place.column("unequal", key), place.column(one, key), key)
    near(place.column("unequal", "loss"), place.column(one, "loss"), 2e-2, "loss")
    # Before the first update only the order of sums differs.
    first, alone = place.updates("unequal")[0], place.updates(one)[0]
    near([float(first["loss"])], [float(alone["loss"])], 1e-6, "first loss")
    near([float(first["grad_norm"])], [float(alone["grad_norm"])], 1e-5, "first norm")
    same(first["quantised"], alone["quantised"], "first counts of what is quantised")


# ---- what a resume says and refuses -----------------------------------------


def test_learning_rate_changed():
    settings = {"optimizer.schedule": "constant", "optimizer.min_lr": 0, "optimizer.lr": 3e-3}
    stop_at("rate", 5, settings, 0)
    out = place.train("rate", {**settings, "optimizer.lr": 1e-3}).expect(
        DONE, r"update +6/12 .* lr 1\.00e-03 ", r"configuration changed since the checkpoint: optimizer\.lr: 0\.003 -> 0\.001\n")
    rates = place.column("rate", "lr")
    near(rates, [1e-3, 2e-3, 3e-3, 3e-3, 3e-3] + [1e-3] * 7, 1e-12, "rates")
    check(re.findall(r"configuration changed .*: (\S+): ", out.text) == ["run.stop_after_update", "optimizer.lr"], "every changed key, no other", out.text)


def test_changes_named():
    """Keys that come and go, routes, a fault: each is named once, nothing else is."""
    stop_at("changes", 2, {"checkpoint.every": 1, "checkpoint.keep": 0}, 0)
    scaling = {"model.rope_scaling.factor": 8, "model.rope_scaling.low_freq_factor": 1,
               "model.rope_scaling.high_freq_factor": 4, "model.rope_scaling.original_max_position": 32}
    out = place.train("changes", {**scaling, "route": "mxfp4-row-sr", "fault": "nan@3", "run.stop_after_update": 4}, 2)
    named = re.findall(r"configuration changed .*: (\S+): (.*) -> (.*)\n", out.text)
    want = [("run.stop_after_update", "2", "4"), ("model.rope_scaling.factor", "absent", "8"),
            ("model.rope_scaling.low_freq_factor", "absent", "1"), ("model.rope_scaling.high_freq_factor", "absent", "4"),
            ("model.rope_scaling.original_max_position", "absent", "32"), ("checkpoint.every", "1", "0"),
            ("checkpoint.keep", "0", "3"), ("route", '"bf16"', '"mxfp4-row-sr"'), ("fault", '""', '"nan@3"'),
            ("model.rope_scaling", "none", "absent")]
    same(named, want, "changes")


def test_route_constants():
    """What a route's arithmetic rests on is in the checkpoint, and a resume under another value is refused by name."""
    stop_at("constants", 2, {"route": "mxfp4-row-sr"}, 0)
    constants = place.meta("constants", 2)["route_constants"]
    check(constants["draw_rounds"] == 10 and constants["draw_seed"] == place.meta("constants", 2)["seed"]
          and abs(constants["mx_adaptive_threshold"] - 0.87) < 1e-6, "constants", str(constants))
    for np in (0, 2):
        place.train("constants", {"route": "mxfp4-row-sr", "run.seed": 77}, np).expect(
            CHECKPOINT, r"constant of the route changed: draw_seed is 77, the checkpoint's is \d+")
    place.train("constants", {"route": "bf16", "run.seed": 77}).expect(DONE, r"run\.seed: \d+ -> 77")  # nothing draws
    stop_at("attention-constants", 2, {"route": "attention-mxfp4"}, 0)
    constants = place.meta("attention-constants", 2)["route_constants"]
    check(constants["attention_tile"] == 128 and constants["attention_p_map"] == "exp2" and constants["attention_lift"] == 4, "attention's", str(constants))


def test_forward_tail():
    """The last share of the updates has a BF16 forward, on record; a resume into it and inside it changes nothing."""
    route = {"route": "nvfp4-te/forward-bf16-tail", "train.updates": 20}
    out = place.train("tail", {**route, "run.stop_after_update": 1})
    if out.code == DEVICE:
        raise Skipped("this backend has no NVFP4")
    place.run("tail-whole", route)
    plain = [r["update"] for r in place.lines("tail-whole", "update") if r.get("forward") == "bf16"]
    check(plain == [19, 20], "updates of the tail", str(plain))
    check(all("fprop_x" not in r["quantised"] for r in place.lines("tail-whole", "update") if r["update"] > 18), "X is not quantised there")
    stop_at("tail-resumed", 18, route, 0)
    stop_at("tail-resumed", 19, route, 0)
    place.run("tail-resumed", route)
    same_run("tail-whole", "tail-resumed", 20, "resumed at 18 and 19 of 20")
    native = place.run("native", {"route": "te-native", "train.updates": 20}) and place.updates("native")
    alike = [a["loss"] == b["loss"] for a, b in zip(native, place.updates("tail-whole"))]
    check(all(alike[:18]) and not any(alike[18:]), "te-native until the tail", str(alike))


def test_finished():
    place.run("finished")
    folder = place.at("finished")

    def seen():
        found = {}
        for base, _, files in os.walk(folder):
            for name in files:
                path = os.path.join(base, name)
                with open(path, "rb") as f:
                    found[path] = (os.stat(path).st_mtime_ns, f.read())
        return found
    before = seen()
    for np in (0, 2):
        place.train("finished", np=np).expect(DONE, r"12 of 12 updates done, nothing to do")
    same(before, seen(), "files of a finished run")
    place.train("finished", {"train.updates": 14}).expect(DONE, r"at update 12\n")
    check(place.column("finished", "update") == list(range(1, 15)), "a longer run goes on")


def test_tokens_seen():
    stop_at("tokens", 5, {}, 0)
    place.run("tokens", {}, 2)
    for r in place.lines("tokens", "update"):
        check(r["samples"] == r["update"] * BATCH and r["tokens"] == r["update"] * BATCH * SEQ, f"samples and tokens of {r}")
        check(r["targets"] == BATCH * SEQ, f"targets of {r}")
    for update in (5, 12):
        meta = place.meta("tokens", update)
        check(meta["update"] == update and meta["samples"] == update * BATCH and meta["tokens"] == update * BATCH * SEQ,
              f"the checkpoint of update {update}", str(meta))


def dies_at_14(np, rank, apart):
    """A save that is written beside training (apart) counts once it is published: what is on disk after the
    death says where the run goes on.  Saved in place, 10 is there before update 11 begins."""
    name, settings = f"lines-{np}-{apart}", {"train.updates": 16, "checkpoint.every": 5, "validation.every": 4, "checkpoint.async": apart}
    out = place.train(name, {**settings, "fault": f"kill@14/{rank}"}, np)
    check(out.code in (-9, 137), f"exit code {out.code}", out.text)
    # Ranks agree on each record: nobody begins update 14 before rank 0 has written that of 13.
    check(place.column(name, "update") == list(range(1, 14)), "13 updates are on record", str(place.column(name, "update")))
    steps, saves = place.steps(name), [r["update"] for r in place.lines(name, "checkpoint")]
    # The save of 10 waited for that of 5; the record of a save follows its publication.
    check(steps == [5, 10] or (apart and steps == [5]), "what is published", str(steps))
    check(saves == [5, 10] and steps == [5, 10] or apart and saves == [5], "the saves on record", f"{saves}, published {steps}")
    with open(place.at(name, "metrics.jsonl"), "a") as f:
        f.write('{"kind":"update","update":14,"lo')  # a line that the death cut
    place.train(name, settings, np).expect(DONE, rf"at update {steps[-1]}\n")
    check(place.column(name, "update") == list(range(1, 17)), "each update once", str(place.column(name, "update")))
    check([r["update"] for r in place.lines(name, "validation")] == [4, 8, 12, 16], "each validation once")
    want = saves + [u for u in (10, 15, 16) if u > steps[-1]]
    saves = [r["update"] for r in place.lines(name, "checkpoint")]
    check(saves == want, "each checkpoint once", f"{saves}, expected {want}")
    check([r["update"] for r in place.lines(name, "start")] == [0, steps[-1]], "both starts")
    check(place.lines(name)[-1]["kind"] == "end", "the end is on record")


def test_one_line_an_update():
    """Dies at 14, resumes from 10 or 5: the lines from there to 13 are made anew."""
    for np, rank in ((0, 0), (2, 1)):
        for apart in (False, True):
            dies_at_14(np, rank, apart)


def test_changed_data():
    stop_at("data", 5, {}, 0)
    was = place.lines("data", "start")[0]["train_digest"]
    shutil.copytree(place.at("corpus"), place.at("corpus-2"))
    shutil.copy(place.at("held-out", "00.txt"), place.at("corpus-2", "99.txt"))
    place.prepare("other.tokens", "corpus-2")
    out = place.train("data", {"data.train": "other.tokens"}).expect(DATA, r"not the one this run read", r"data\.allow_change")
    digests = re.findall(r"\b[0-9a-f]{32}\b", out.text.split("not the one this run read")[1])
    check(len(digests) == 2 and digests[0] == was and digests[1] != was, "both digests", out.text)
    place.train("data", {"data.train": "other.tokens"}, 2).expect(DATA, was)
    check(place.column("data", "update") == [1, 2, 3, 4, 5], "a refused start leaves the records alone")
    place.train("data", {"data.train": "other.tokens"}, more=("--allow-data-change",)).expect(
        DONE, rf"stream changed: digest {was} -> {digests[1]}")
    check(place.column("data", "update") == list(range(1, 13)), "goes on")
    # The same text under another name is the same stream.
    shutil.copy(place.at("train.tokens"), place.at("moved.tokens"))
    stop_at("moved", 5, {}, 0)
    place.train("moved", {"data.train": "moved.tokens"}).expect(DONE)


def test_resume_path():
    settings = {"checkpoint.every": 4, "checkpoint.keep": 0}
    place.run("path", settings)
    for absent in (place.step("path", 9), "no/such/place"):
        place.train("path", settings, more=("--resume", absent)).expect(CHECKPOINT, "step-00000004, step-00000008, step-00000012")
    place.train("path", settings, 2, more=("--resume", "none")).expect(CONFIG, "step-00000004, step-00000008, step-00000012")
    check(place.steps("path") == [4, 8, 12] and len(place.column("path", "update")) == 12, "nothing was touched")
    place.train("nothing-yet", settings, more=("--resume", "nothing-yet/checkpoints/step-00000004")).expect(CHECKPOINT)
    place.train("fresh", settings, more=("--resume", "none")).expect(DONE)
    same_run("path", "fresh", 12, "--resume none in a fresh folder")
    # A branch from another run's checkpoint.
    place.train("branch", settings, more=("--resume", place.step("path", 4))).expect(DONE, "at update 4\n")
    same(place.updates("path")[4:], place.updates("branch"), "a branch from update 4")
    same(place.tensors("path", 12), place.tensors("branch", 12), "a branch from update 4: tensors")


def test_going_back():
    """--resume to an older step: what was trained after it no longer counts."""
    settings = {"checkpoint.every": 4, "checkpoint.keep": 0}
    place.run("back", settings)
    place.train("back", {**settings, "run.stop_after_update": 6}, more=("--resume", place.step("back", 4))).expect(PREEMPTED)
    check(place.steps("back") == [4, 6], f"steps {place.steps('back')}")
    check({"superseded-00000008", "superseded-00000012"} <= set(os.listdir(place.at("back", "checkpoints"))), "later steps are set aside")
    place.train("back", settings).expect(DONE, r"at update 6\n")
    check(place.column("back", "update") == list(range(1, 13)), "each update once")
    same_run(whole("bf16", 0, **settings), "back", 12, "went back to 4")


def test_overfit_one_batch():
    settings = {"train.overfit_one_batch": True, "train.updates": 60, "optimizer.schedule": "constant", "optimizer.min_lr": 0, "train.global_batch": 2,
                "optimizer.lr": 5e-3}
    place.run("overfit", settings)
    hashes, losses = place.column("overfit", "batch_hash"), place.column("overfit", "loss")
    check(len(set(hashes)) == 1, "one batch")
    check(losses[0] > 5 and losses[-1] < 0.5, f"loss {losses[0]} -> {losses[-1]}")
    stop_at("overfit-2", 30, settings, 0)
    place.run("overfit-2", settings)
    same_run("overfit", "overfit-2", 60, "resumed on one batch")


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
