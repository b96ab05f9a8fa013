#!/usr/bin/env python3
"""What a configuration can ask of a CUDA backend: it is executed, or refused by name before anything is computed.
The program never ends in a kernel's launch (on the host model of CUDA, build/model/fp4d).

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0 iff all are ok.
"""
import os
import sys

from fp4d import BUILD, DEVICE, DONE, Place, check, main

place = Place(program=os.path.join(BUILD, "model", "fp4d"), **{
    "run.backend": "sm90", "model.vocab_size": 260, "model.hidden_size": 32, "model.ffn_size": 48, "model.n_layers": 1,
    "train.seq_len": 16, "train.local_batch": 1, "train.global_batch": 2, "validation.samples": 1, "train.updates": 1,
    "optimizer.warmup_updates": 0, "route": "bf16", "train.param_dtype": "bf16"})


def refused(why, **settings):
    for command in ("check", "train"):
        words = [w for k, v in settings.items() for w in ("--set", f"{k}={v}")]
        out = place.command(command, "tiny.yaml", "--set", "run.folder=refused", *words).expect(DEVICE, why)
        check(not os.path.exists(place.at("refused", "metrics.jsonl")), "no run began", out.text)


def test_refused_by_name():
    wide = {"model.head_dim": 512}
    for backend in ("sm90", "sm100"):
        refused("head_dim 512: backend sm.* does not execute a head_dim above 256", **wide, **{"run.backend": backend})
    refused("does not execute local_batch x n_heads above 65535", **{
        "model.n_heads": 8192, "model.n_kv_heads": 1, "model.head_dim": 2, "train.local_batch": 8, "train.global_batch": 8})
    refused("bf16 and fp32 operands alone", **{"route": "mxfp4-row-sr", "model.ffn_size": 64, "train.seq_len": 32})
    refused("attention in bf16 alone", **{"route": "attention-fp8", "model.head_dim": 16})


def test_bench_refuses_too():
    place.command("bench", "attention", "tiny.yaml", "--set", "model.head_dim=512").expect(DEVICE, "does not execute a head_dim above 256")


FP32 = {"route": "fp32", "train.param_dtype": "fp32"}
EXECUTED = [
    {"train.master": "true", "train.recompute": "all", "data.attention": "document"},
    {"train.master": "false", "train.gradient_dtype": "bf16", "model.tied": "true", "train.head_chunk": 5, "train.recompute": "boundaries"},
    {"train.param_dtype": "fp32", "data.boundary": "mask", "model.head_dim": 64},
    {"model.hidden_size": 34, "model.n_heads": 1, "model.head_dim": 6, "model.ffn_size": 35, "model.vocab_size": 259, "train.seq_len": 15},
    {**FP32, "model.n_heads": 1, "model.head_dim": 256},
    {**FP32, "model.hidden_size": 33, "model.n_heads": 3, "model.head_dim": 10, "model.ffn_size": 35, "train.seq_len": 1, "model.tied": "true"},
]


def test_executed():
    for i, settings in enumerate(EXECUTED):
        for backend in ("sm90", "sm100") if i == 2 else ("sm90",):
            out = place.train(f"run-{i}-{backend}", {**settings, "run.backend": backend})
            check(out.code == DONE, f"{settings} on {backend}: exit code {out.code}", out.text)


def test_evaluated():
    """Padding has no part of the probability there either: 260 rows for 258 ids."""
    place.train("evaluated").expect(DONE)
    with open(place.at("requests.jsonl"), "w") as f:
        f.write('{"context": [256, 70, 71], "continuation": [72, 73]}\n')
    lines = {}
    for backend in ("cpu", "sm90"):
        out = place.command("score", "evaluated", "tiny.yaml", "--in", "requests.jsonl", "--set", f"run.backend={backend}").expect(DONE, "padding")
        lines[backend] = float(out.text.split("\"logprob\":")[1].split(",")[0])
    check(abs(lines["cpu"] - lines["sm90"]) < 5e-3 * abs(lines["cpu"]), "log probabilities", str(lines))
    place.command("eval", "evaluated", "tiny.yaml", "--vocab-size", "258").expect(DONE)
    place.command("generate", "evaluated", "--prompt", "a", "--tokens", "2").expect(DONE)


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
