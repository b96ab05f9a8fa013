#!/usr/bin/env python3
"""Documents and sources in a run, seen from outside: who counts, who attends, how sure a loss is, and
that the loader's thread changes nothing but the time.

BUILD names the build folder (default build); `make worlds` has made the program whose loader is slow
(tests/trainer_masked_main.c).  Prints "ok NAME" or "not ok NAME: why"; exit status 0 iff all are ok.
Arguments: names of tests to run (default all).
"""
import functools
import json
import math
import os
import re
import struct
import sys

from fp4d import BATCH, BUILD, DATA, DONE, PREEMPTED, SEQ, Place, check, main, near, same

log = []  # of whole()
PLAIN = {"route": "fp32", "train.param_dtype": "fp32"}


@functools.cache
def place():
    p = Place(files=24, each=128)
    # One stream of three sources, the first being short.
    for name, begin, end in (("few", 0, 3), ("some", 3, 11), ("many", 11, 24)):
        os.makedirs(p.at("by", name))
        for i in range(begin, end):
            os.rename(p.at("corpus", f"{i:02d}.txt"), p.at("by", name, f"{i:02d}.txt"))
    p.prepare("train.tokens", "by/few,by/some,by/many")
    os.rename(p.at("held-out"), p.at("by", "held-out"))
    p.prepare("validation.tokens", "by/held-out,by/few")
    return p


def stream(path):
    """Ids, first tokens of documents and their sources, from the file's bytes as docs/formats.md has them."""
    with open(path, "rb") as f:
        data = f.read()
    tokens, documents = struct.unpack_from("<QQ", data, 24)
    ids = struct.unpack_from(f"<{tokens}H", data, 256)
    at = 256 + (2 * tokens + 7) // 8 * 8
    first = struct.unpack_from(f"<{documents + 1}Q", data, at)
    return ids, first, data[at + 8 * (documents + 1):][:documents]


def by_source(n_updates, names, masked=False):
    """For updates 1..n of the first epoch: tokens by source so far, targets by source of each."""
    ids, first, sources = stream(place().at("train.tokens"))
    owner = [d for d in range(len(sources)) for _ in range(first[d], first[d + 1])]
    so_far, out = dict.fromkeys(names, 0), []
    for u in range(n_updates):
        targets = dict.fromkeys(names, 0)
        for t in range(u * BATCH * SEQ + 1, (u + 1) * BATCH * SEQ + 1):
            name = names[sources[owner[t]]]
            so_far[name] += 1
            targets[name] += not (masked and owner[t] != owner[t - 1])
        out.append((dict(so_far), targets))
    return out


def check_sources(name, masked=False):
    records = place().lines(name, "update")
    names = list(records[0]["sources"])
    check(names == ["few", "some", "many"], f"sources {names}")
    for u, (r, (tokens, targets)) in enumerate(zip(records, by_source(6, names, masked))):
        check({n: s["tokens"] for n, s in r["sources"].items()} == tokens, f"{name}, update {u + 1}: {r['sources']}, expected {tokens}")
        check({n: s["targets"] for n, s in r["sources"].items()} == targets, f"{name}, update {u + 1}: {r['sources']}, expected {targets}")
    for u, r in enumerate(records):
        check(sum(s["tokens"] for s in r["sources"].values()) == r["tokens"] == (u + 1) * BATCH * SEQ, "tokens add up")
        check(sum(s["targets"] for s in r["sources"].values()) == r["targets"], "targets add up")


def test_tokens_by_source():
    for name, np, settings in (("alone", 0, {}), ("two", 2, {}), ("four", 4, {"train.local_batch": 1})):
        place().run(name, {**PLAIN, **settings}, np)
        check_sources(name)


def test_tokens_by_source_after_a_resume():
    """Stopped twice, at another number of ranks each time."""
    for np, stop in ((2, 3), (4, 5), (0, 0)):
        settings = {**PLAIN, "train.local_batch": 1, "run.stop_after_update": stop}
        place().train("resumed", settings, np).expect(PREEMPTED if stop else DONE)
    check_sources("resumed")
    same([r["sources"] for r in place().updates("resumed")], [r["sources"] for r in place().updates(whole())], "sources")


@functools.cache
def whole(**settings):
    name = "whole" + "".join(str(v) for v in settings.values())
    log.append(place().run(name, {**PLAIN, **settings}).text)
    return name


def test_masked_boundaries():
    name = whole(**{"data.boundary": "mask"})
    check_sources(name, masked=True)
    a, b = place().updates(name), place().updates(whole())
    check(all(x["targets"] < y["targets"] and x["tokens"] == y["tokens"] for x, y in zip(a, b)), "fewer targets, the same tokens")
    check(all(x["batch_hash"] != y["batch_hash"] for x, y in zip(a, b)), "the batch hash sees it")
    for np, local_batch in ((2, 4), (4, 1)):
        place().run(f"masked-{np}", {**PLAIN, "data.boundary": "mask", "train.local_batch": local_batch}, np)
        same([r["batch_hash"] for r in place().updates(f"masked-{np}")], [r["batch_hash"] for r in a], "batch hash")
        near(place().column(f"masked-{np}", "loss"), place().column(name, "loss"), 1e-5, f"{np} ranks: loss")


def attending(route, **more):
    settings = {"route": route, "train.param_dtype": "fp32" if route == "fp32" else "bf16", "data.attention": "document",
                "data.boundary": "mask", **more}
    p = place()
    name = f"attending-{route}"
    p.run(name, settings)
    p.train(name + "-again", {**settings, "run.stop_after_update": 7}).expect(PREEMPTED)
    p.run(name + "-again", settings)
    same(p.updates(name + "-again"), p.updates(name), "resumed")
    p.run(name + "-threads", {**settings, "run.threads": 3})
    same(p.updates(name + "-threads"), p.updates(name), "threads")
    p.run(name + "-whole", {**settings, "data.attention": "whole"})
    check(p.column(name, "loss")[0] != p.column(name + "-whole", "loss")[0], "another loss than with attention to the whole sample")
    check(p.column(name, "loss")[-1] < p.column(name, "loss")[0] - 0.5, "it learns")
    return name, settings


def test_attention_within_documents():
    name, settings = attending("fp32")
    place().run("attending-2", {**settings, "train.local_batch": 2}, 2)
    near(place().column("attending-2", "loss"), place().column(name, "loss"), 1e-5, "2 ranks: loss")
    place().command("generate", name, "--prompt", "The ").expect(DONE)
    place().command("eval", name, "tiny.yaml", *("--set", "route=fp32", "--set", "train.param_dtype=fp32")).expect(
        DONE, r"not as the checkpoint was trained: data.attention")


def test_attention_within_documents_mxfp4(): attending("mxfp4-row-sr")
def test_attention_within_documents_in_fp8(): attending("attention-fp8")


def evaluate(name, out, np=0, samples=0, **settings):
    p = place()
    sets = [w for k, v in {**PLAIN, "run.folder": name, **settings}.items() for w in ("--set", f"{k}={v}")]
    text = p.command("eval", name, "tiny.yaml", *sets, "--samples", str(samples), "--json", out, np=np).expect(DONE).text
    with open(p.at(out)) as f:
        return json.load(f), text


def test_eval_is_the_same_every_time():
    for route in ("fp32", "mxfp4-row-sr"):
        settings = {"route": route, "train.param_dtype": "fp32" if route == "fp32" else "bf16", "data.boundary": "mask"}
        name = f"judged-{route}"
        place().run(name, {**settings, "train.updates": 2, "optimizer.warmup_updates": 1})
        first, text = evaluate(name, "first.json", **settings)
        for np, local_batch in ((0, 8), (2, 8), (3, 1), (4, 2), (0, 1), (0, 8)):
            again, _ = evaluate(name, "again.json", np, **settings, **{"train.local_batch": local_batch, "train.global_batch": 48})
            check(again == first, f"{route}: {np} ranks, local batch {local_batch}", f"{again}\n{first}")


def test_eval_with_scales_of_a_micro_batch():
    """A tensor's factor spans the samples of a micro-batch: its neighbours are the same at any number of ranks."""
    settings = {"route": "nvfp4-global", "train.param_dtype": "bf16", "train.local_batch": 2, "train.global_batch": 48}
    place().run("spanned", {**settings, "train.global_batch": 8, "train.updates": 2, "optimizer.warmup_updates": 1})
    first, _ = evaluate("spanned", "first.json", samples=7, **settings)
    for np in (2, 3, 4):
        again, _ = evaluate("spanned", "again.json", np, samples=7, **settings)
        check(again == first, f"{np} ranks", f"{again}\n{first}")
    other, _ = evaluate("spanned", "other.json", samples=7, **{**settings, "train.local_batch": 1})
    check(other["loss"] != first["loss"], "another micro-batch is another factor")


def test_interval_and_sources():
    r, text = evaluate(whole(), "r.json")
    nll, targets = r["sequence_nll"], r["sequence_targets"]
    n = len(nll)
    check(n == r["samples"] and sum(targets) == r["targets"], "counts")
    near([r["loss"]], [sum(a * b for a, b in zip(nll, targets)) / sum(targets)], 1e-12, "loss")
    mean = sum(nll) / n
    se = math.sqrt(sum((x - mean) ** 2 for x in nll) / (n - 1) / n)
    near([r["standard_error"]], [se], 1e-9, "standard error")
    near(r["interval_95"], [r["loss"] - 1.96 * se, r["loss"] + 1.96 * se], 1e-12, "interval")
    check(list(r["sources"]) == ["held-out", "few"], f"sources {r['sources']}")
    check(sum(s["targets"] for s in r["sources"].values()) == r["targets"], "targets of sources")
    near([sum(s["loss"] * s["targets"] for s in r["sources"].values()) / r["targets"]], [r["loss"]], 1e-12, "sources add up to the loss")
    check(f"95% interval {r['interval_95'][0]:.6f} to {r['interval_95'][1]:.6f}" in text and "held-out" in text, "said", text)

    ids, first, sources = stream(place().at("validation.tokens"))
    owner = [d for d in range(len(sources)) for _ in range(first[d], first[d + 1])]
    held_out = sum(sources[owner[t]] == 0 for t in range(1, n * SEQ + 1))
    check(r["sources"]["held-out"]["targets"] == held_out, "whose document a target lies in")

    one, text = evaluate(whole(), "one.json", samples=1)
    check(one["interval_95"] is None and one["standard_error"] == "nan" and "no interval" in text, "one sequence", text)
    check(re.search(r"validation loss \d\.\d{4} \+- \d\.\d{4} over 4 sequences: held-out \d\.\d{4}, few \d\.\d{4}", log[0]), "said by the run", log[0])
    last = place().lines(whole(), "validation")[-1]
    check(set(last["sources"]) == set(r["sources"]) and len(last["interval_95"]) == 2, "the run's own records")


def test_another_document_changes_nothing():
    """Documents x0, y0, x1, y1, ... in this order; other bytes in every x: what is said of the ys stays, to the bit."""
    p = place()
    for version in ("as-is", "changed"):
        os.makedirs(p.at(version))
        for i in range(6):
            with open(p.at("by", "many" if i < 5 else "some", f"{11 + i:02d}.txt" if i < 5 else "03.txt"), "rb") as f:
                text = f.read(70 + 9 * i)
            if version == "changed" and i % 2 == 0:
                text = text[::-1]
            with open(p.at(version, f"{'xy'[i % 2]}{i // 2}.txt"), "wb") as f:
                f.write(text)
        names = [f"{version}/{'xy'[i % 2]}{i // 2}.txt" for i in range(6)]
        p.command("prepare", "tiny.yaml", "--force", "--set", f"data.sources={','.join(names)}", "--set", f"data.train={version}.tokens",
                  "--set", "data.validation=", "--set", "data.shuffle_documents=false").expect(DONE)
    for attention, stays in (("document", True), ("whole", False)):
        for local_batch in (1, 2):
            results = [evaluate(whole(), "swap.json", **{"data.validation": f"{version}.tokens", "data.attention": attention, "data.boundary": "mask",
                                                         "train.local_batch": local_batch})[0]["sources"] for version in ("as-is", "changed")]
            a, b = ({name: s["loss"] for name, s in r.items()} for r in results)
            check(len(a) == 6 and list(a) == list(b), f"sources {list(a)}")
            same_ones = [name for name in a if a[name] == b[name]]
            expected = [name for name in a if name.startswith("y")] if stays else []
            check(same_ones == expected, f"{attention}, local batch {local_batch}: the losses of {same_ones} stay, expected {expected}", f"{a}\n{b}")


def test_a_slow_loader():
    """Only the time is another; the wait is said."""
    p, settings = place(), {**PLAIN, "train.updates": 4, "optimizer.warmup_updates": 1, "validation.every": 0}
    p.run("quick", settings)
    program, p.program = p.program, os.path.join(BUILD, "tests", "trainer_masked_main")
    try:
        p.train("slow", settings, 0, environment={"FP4D_TEST_SLOW": "300"}).expect(
            DONE, r"update +\d+ stood still for \d+ of \d+ ms: samples are read slower than they are trained on")
    finally:
        p.program = program
    same(p.updates("slow"), p.updates("quick"), "records")
    slow, quick = ([float(r["data_wait_ms"]) for r in p.lines(name, "update")] for name in ("slow", "quick"))
    # The first update waits for all of its samples; how much of later waits training hides depends on the machine.
    check(sum(slow) > 2000 and sum(quick) < sum(slow) / 2, f"waits of {slow} ms for 8 samples of 300 ms each, else of {quick} ms")


def test_an_error_waits_for_its_update():
    """Sample 20 cannot be read: update 3 says so, and updates 1 and 2 are on record."""
    p = place()
    program, p.program = p.program, os.path.join(BUILD, "tests", "trainer_masked_main")
    try:
        for np in (0, 2):
            name = f"unreadable-{np}"
            p.train(name, PLAIN, np, environment={"FP4D_TEST_UNREADABLE": "20"}).expect(DATA, r"sample 20 is not to be read")
            check([r["update"] for r in p.lines(name, "update")] == [1, 2], "two updates on record")
    finally:
        p.program = program


def close():
    if place.cache_info().currsize:
        place().close()


if __name__ == "__main__":
    sys.exit(main(globals(), close))
