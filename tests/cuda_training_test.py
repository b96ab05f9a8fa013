#!/usr/bin/env python3
"""A short training on a CUDA backend beside the same one on the CPU backend.

`make check` runs it on the host model of CUDA (build/model/fp4d), where contractions are the CPU's;
`make check-gpu` with GPU=1 on a GPU (build/fp4d).  BUILD names the build folder (default build).  Prints
"ok NAME" or "not ok NAME: why"; exit status 0 iff all are ok.  Contractions, attention and the loss
differ in the order of their sums alone, so the losses are close; a run must repeat to the bit.
"""
import json
import os
import re
import subprocess
import sys

from fp4d import BUILD, COMMUNICATION, DEVICE, DONE, ENVIRONMENT, PREEMPTED, PROGRAM, ROOT, SYSTEM, Place, Skipped, check, main, same

BACKEND = os.environ.get("BACKEND", "sm90")
GPU = bool(os.environ.get("GPU"))
UPDATES = 200 if GPU else 2  # the model takes seconds for each

place = Place(program=PROGRAM if GPU else os.path.join(BUILD, "model", "fp4d"), **{
    "model.hidden_size": 128, "model.n_heads": 2, "train.seq_len": 64, "train.global_batch": 4, "validation.samples": 2,
    "train.updates": UPDATES, "optimizer.warmup_updates": 1, "route": "bf16", "train.param_dtype": "bf16"})


def run(name, backend, **more):
    if not os.path.exists(place.at(name)):
        place.run(name, {"run.backend": backend, **more})
    return place.column(name, "loss")


def test_losses_follow_the_cpu():
    cpu, gpu = run("cpu", "cpu"), run("gpu", BACKEND)
    check(len(cpu) == len(gpu) == UPDATES, "an update each", str((cpu, gpu)))
    # The first loss has one forward pass of differences, the others those of updates before.
    for i, (a, b) in enumerate(zip(cpu, gpu)):
        bound = 2e-3 if i == 0 else 5e-2
        check(abs(a - b) <= bound * a, f"update {i + 1}: {b} beside {a}, within {bound:g}", str((cpu, gpu)))
    check(not GPU or gpu[-1] < gpu[0] - 0.5, "it learns", str(gpu))
    a, b = place.column("cpu", "grad_norm")[0], place.column("gpu", "grad_norm")[0]
    check(abs(a - b) <= 2e-2 * a, f"first gradient's norm: {b} beside {a}")


def test_a_run_moves_between_backends():
    """Begun on the CPU, gone on from its checkpoint on the GPU, and back: the losses follow those of the CPU alone."""
    n = UPDATES if GPU else 3
    cpu = run("cpu" if GPU else "cpu-longer", "cpu", **{"train.updates": n})
    place.train("moved", {"run.backend": "cpu", "train.updates": n, "run.stop_after_update": n // 3}).expect(PREEMPTED)
    place.train("moved", {"run.backend": BACKEND, "train.updates": n, "run.stop_after_update": 2 * n // 3}).expect(PREEMPTED)
    place.run("moved", {"run.backend": "cpu", "train.updates": n})
    moved = place.column("moved", "loss")
    check(len(cpu) == len(moved) == n, "an update each", str((cpu, moved)))
    same(cpu[:n // 3], moved[:n // 3], "losses before the first move")
    for i, (a, b) in enumerate(zip(cpu, moved)):
        bound = 2e-3 if i <= n // 3 else 5e-2
        check(abs(a - b) <= bound * a, f"update {i + 1}: {b} beside {a}, within {bound:g}", str((cpu, moved)))


def test_staging_is_planned():
    """What other ranks send has its place in the memory table, of several ranks alone."""
    for gpus, row in ((1, False), (2, True)):
        out = place.command("plan", "tiny.yaml", "--gpus", str(gpus), "--set", f"run.backend={BACKEND}").expect(DONE)
        check(bool(re.search(r"\n  communication +268\.435 MB +other ranks' gradients", out.text)) == row, f"{gpus} GPUs", out.text)


def test_memory_is_as_planned():
    """What is in use after the first update beside `plan`; on the model other processes and a driver do not count."""
    run("gpu", BACKEND)
    memory = place.lines("gpu", "update")[0]["device_memory_bytes"]
    start = place.lines("gpu", "start")[0]["memory_bytes"]
    check(memory["planned"] == start["total"] + start["device_itself"], "planned", str((memory, start)))
    check(memory["used"] <= memory["total"] and (GPU or abs(memory["used"] / memory["planned"] - 1) < 0.03), "within 3 %", str(memory))
    check(not any("device_memory_bytes" in r for r in place.lines("gpu", "update")[1:]), "said once")


def test_choices_of_contractions():
    """On record with a process' first update; a resume chooses alike, and says where it does not."""
    run("gpu", BACKEND)
    first, *others = place.lines("gpu", "update")
    check(first["contractions"] and all(re.match(r"(bf16 )?\[\d+, \d+, \d+\]", c) for c in first["contractions"]), "by product", str(first))
    check(not any("contractions" in r for r in others), "said once")
    place.train("chosen", {"run.backend": BACKEND, "run.stop_after_update": UPDATES // 2}).expect(PREEMPTED)
    path = place.at("chosen", "metrics.jsonl")
    with open(path) as f:
        text = f.read()
    product, choice = next(iter(first["contractions"].items()))
    with open(path, "w") as f:
        f.write(text.replace(json.dumps(choice), json.dumps("another" * 2000), 1))  # all is said, whatever stands there
    out = place.run("chosen", {"run.backend": BACKEND})
    check(re.search(re.escape(f"1 of {len(first['contractions'])} contractions are computed otherwise than before this start, as {product}: {choice}, before ")
                    + "another[another]{,500}; from here on .* not the same to the bit\n", out.text), "the one that changed", out.text)
    same(first["contractions"], place.lines("chosen", "update")[UPDATES // 2]["contractions"], "the resume chose as the run did")


def ranks(name, np, gpus, **more):
    environment = {"FP4D_MODEL_GPUS": str(gpus), "FP4D_MODEL_FABRIC": "4,4/a9", "NCCL_NVLS_ENABLE": "0"}
    return place.train(name, {"run.backend": BACKEND, **more}, np, environment=environment)


def test_a_rank_without_a_gpu_is_refused():
    np = 9 if GPU else 2
    out = ranks("refused", np, 1, **{"train.global_batch": 2 * np}).expect(DEVICE, r"wants a GPU of its own, and it has \d")
    check(not os.path.exists(place.at("refused", "metrics.jsonl")), "no run began", out.text)


def test_two_ranks_follow_one():
    """Gradients are summed over NCCL, weights copied: the losses are those of one rank but for the order of sums."""
    one = run("gpu", BACKEND)
    out = ranks("ranks", 2, 2)
    if GPU and "and it has 1" in out.text:
        raise Skipped("needs two GPUs")
    out.expect(DONE, r"exchanges: NCCL 2\.\d+\.\d+, sums in rank order; rank 0's GPU reaches \d of 1 others of its host directly; (.*NVLink fabric.*); NCCL_NVLS_ENABLE 0")
    check(GPU or "2 of 2 GPUs in a rack's NVLink fabric, 1 clique" in out.text and "degraded bandwidth at the GPU of rank 1" in out.text, "the fabric", out.text)
    waits = [float(w) for w in place.column("ranks", "exchange_wait_ms")]
    check(all(w >= 0 for w in waits) and sum(waits) > 0, "the device's waits are recorded", str(waits))
    two = place.column("ranks", "loss")
    check(len(one) == len(two), "an update each", str((one, two)))
    for i, (a, b) in enumerate(zip(one, two)):
        check(abs(a - b) <= (1e-5 if i == 0 else 2e-2) * a, f"update {i + 1}: {b} beside {a}", str((one, two)))


def test_unequal_shares():
    """Four micro-batches on three ranks, of which two wait for the first: the losses are those of one rank but for the order of sums."""
    one = run("gpu", BACKEND)
    out = ranks("unequal", 3, 3, **{"train.local_batch": 1, "data.validation": "", "checkpoint.at_end": False})
    if GPU and "and it has " in out.text:
        raise Skipped("needs three GPUs")
    out.expect(DONE, r"warning: 4 micro-batches an update over 3 ranks: 1 of them compute 2, the others 1 and wait")
    three = place.column("unequal", "loss")
    check(len(one) == len(three), "an update each", str((one, three)))
    for i, (a, b) in enumerate(zip(one, three)):
        check(abs(a - b) <= (1e-5 if i == 0 else 2e-2) * a, f"update {i + 1}: {b} beside {a}", str((one, three)))


def test_a_world_changes():
    """Two ranks' checkpoint goes on on one, and one's on two: the losses are those of a run that stays, but for the order of sums."""
    half = UPDATES // 2
    for name, np in (("shrinks", (2, 1)), ("grows", (1, 2))):
        for n, stop, code in ((np[0], half, PREEMPTED), (np[1], 0, DONE)):
            out = ranks(name, n, n, **{"run.stop_after_update": stop})
            if GPU and "and it has 1" in out.text:
                raise Skipped("needs two GPUs")
            out.expect(code)
        check("resumed from" in out.text, "it went on", out.text)
        one, changed = run("gpu", BACKEND), place.column(name, "loss")
        check(len(one) == len(changed), "an update each", str((one, changed)))
        for i, (a, b) in enumerate(zip(one, changed)):
            check(abs(a - b) <= (1e-5 if i == 0 else 2e-2) * a, f"{name}, update {i + 1}: {b} beside {a}", str((one, changed)))


def test_scaling_is_printed():
    """scripts/scaling.py: a row for each case, of which those of two ranks have a share of what two single GPUs do.  The configuration's
    run is left alone, and its validation left out: 768 samples of 8B are longer than the updates."""
    out = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "scaling.py"), "tiny.yaml", "--program", place.program, "--updates", "1",
                          "--accumulation", "2", "--set", f"run.backend={BACKEND}", "--set", "train.master=false", "--set", "run.folder=scaled",
                          "--set", "data.validation=absent.tokens", "--set", "validation.every=1"], cwd=place.path, capture_output=True,
                         text=True, env={**ENVIRONMENT, "FP4D_MODEL_GPUS": "2", "NCCL_NVLS_ENABLE": "0"})
    if GPU and "and it has 1" in out.stdout:
        raise Skipped("needs two GPUs")
    check(out.returncode == 0 and not out.stderr, "it ends well", out.stderr)
    rows = [line.split() for line in out.stdout.splitlines()[1:]]
    check([row[:4] for row in rows] == [r.split() for r in ("1 1 1 bf16", "2 1 1 bf16", "1 1 2 bf16", "2 1 2 bf16", "1 2 1 bf16", "2 2 1 bf16",
                                                            "2 2 1 bf16", "1 1 2 fp32", "2 1 2 fp32")], "the cases", out.stdout)
    for row in rows:
        numbers = [float(x) for x in row[4:]]
        check(len(numbers) == 8 and all(x >= 0 for x in numbers), "figures alone", out.stdout)
    check(not os.path.exists(place.at("scaled")), "no run of the configuration's")


def test_scaling_refuses():
    for words in (["--accumulation", "3"], ["--accumulation", "0"], ["--ranks", "1"], ["--ranks", "-2"], ["--updates", "0"]):
        out = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "scaling.py"), "tiny.yaml", "--program", "none", *words], cwd=place.path,
                             capture_output=True, text=True)
        check(out.returncode == 1 and out.stderr.startswith(f"scaling: {words[0]} must be") and not out.stdout, str(words), out.stderr + out.stdout)


def test_a_fault_of_one_device():
    """While gradients are exchanged: the device's exit code, from the rank that has it."""
    if GPU:
        raise Skipped("on the host model")
    out = place.train("faulted", {"run.backend": BACKEND}, 2, environment={"FP4D_MODEL_GPUS": "2", "FP4D_MODEL_FAULT": "2/1"})
    out.expect(DEVICE, r"\[r1\] error: rank 1 .*in '[a-z ]+' of update 1: GPU 1: .*an illegal memory access was encountered")


def test_collectives_are_measured():
    """Ours beside the library's own; alone what one can."""
    for np in (0, 2):
        out = place.command("bench", "collectives", "tiny.yaml", "--megabytes", "1", "--repeat", "2", "--json", "--set", f"run.backend={BACKEND}", np=np,
                            environment={"FP4D_MODEL_GPUS": "2", "NCCL_NVLS_ENABLE": "0"})
        if GPU and "and it has 1" in out.text:
            raise Skipped("needs two GPUs")
        out.expect(DONE)
        rows = [json.loads(line) for line in out.text.splitlines() if line.startswith("{")]
        check(len(rows) == (4 if np else 3), "a row each", out.text)
        for r in rows:
            check(r["world"] == max(np, 1) and r["bytes"] == 1 << 20, "row", str(r))
            check(abs(r["bus_bytes_per_second"] - r["bytes_per_second"] * (r["world"] - 1) / r["world"]) < 1, "(n-1)/n", str(r))


def test_collectives_that_fail():
    """Memory that there is not is refused in agreement; what one rank meets alone, in the midst of exchanges or of the library's own
    calls, ends the job with that rank's code, and it alone speaks."""
    if GPU:
        raise Skipped("on the host model")

    def bench(megabytes, repeat, np=2, **environment):
        return place.command("bench", "collectives", "tiny.yaml", "--megabytes", str(megabytes), "--repeat", str(repeat), "--set", f"run.backend={BACKEND}", np=np,
                             environment={"FP4D_MODEL_GPUS": "2", "NCCL_NVLS_ENABLE": "0", **environment})
    said = re.compile(r"error: .*")
    for out, code, words in ((bench(9000, 2), SYSTEM, r"rank 0: no GPU memory for 9437184000 bytes"),
                             (bench(1, 3, FP4D_MODEL_FAULT="2/1"), DEVICE, r"\[r1\] error: .*GPU 1: .*illegal memory access"),
                             (bench(1, 3, FP4D_MODEL_FAULT="12/1"), DEVICE, r"ours: all-gather (?s:.*)\[r1\] error: .*GPU 1: .*illegal memory access"),
                             (bench(1, 3, FP4D_MODEL_NCCL_ERROR="2/1"), COMMUNICATION, r"\[r1\] error: .*NCCL: asynchronous error: remote process exited"),
                             (bench(1, 3, 0, FP4D_MODEL_NCCL_ERROR="2/0"), COMMUNICATION, r"error: NCCL: asynchronous error: remote process exited"),
                             (bench(1, 3, FP4D_MODEL_NCCL_ERROR="12/1"), COMMUNICATION, r"ours: all-gather (?s:.*)\[r1\] error: .*NCCL: asynchronous error: remote")):
        out.expect(code, words)
        check(len(said.findall(out.text)) == 1, "said once", out.text)


def on_a_gpu():
    if not GPU:
        raise Skipped("on a GPU (make check-gpu)")


def test_recomputing_changes_no_bit():
    on_a_gpu()
    run("gpu", BACKEND)
    for what in ("boundaries", "all"):
        run(f"gpu-{what}", BACKEND, **{"train.recompute": what})
        same(place.updates("gpu"), place.updates(f"gpu-{what}"), f"updates of recompute: {what}")


def test_the_same_run_has_the_same_bits():
    on_a_gpu()
    run("gpu", BACKEND)
    run("gpu-again", BACKEND)
    same(place.updates("gpu"), place.updates("gpu-again"), "updates")


def test_a_resume_has_the_same_bits():
    on_a_gpu()
    run("gpu", BACKEND)
    place.train("gpu-resumed", {"run.backend": BACKEND, "run.stop_after_update": UPDATES // 2}).expect(PREEMPTED)
    place.run("gpu-resumed", {"run.backend": BACKEND})
    same(place.updates("gpu"), place.updates("gpu-resumed"), "updates")


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
