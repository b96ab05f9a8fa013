#!/usr/bin/env python3
"""`import`, `export` and `score` from outside: bytes there and back, transformers' probabilities, what is refused.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).  tests/peer/transformers_llama.py
is the comparison with transformers itself.
"""
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys

import hf_model as hf
from fp4d import CHECKPOINT, DATA, DONE, ENVIRONMENT, LIMIT, PROGRAM, ROOT, USAGE, Place, check, main, same, words

place = Place()

SPELLED = {"F32": "fp32", "BF16": "bf16"}


def fresh(name):
    path = place.at(name)
    shutil.rmtree(path, ignore_errors=True)
    return path


def write(name, case, dtype, shards=1, settings=None, change=None):
    """A model folder; `change` edits its tensors."""
    found = hf.tensors(case, dtype)
    if change:
        change(found)
    hf.write_model(fresh(name), {**hf.config(case), **(settings or {})}, found, shards)
    return found


def bring_in(name, *more):
    fresh(name + "-ckpt")
    return place.command("import", name, name + "-ckpt", *more)


def take_out(ckpt, name, *more):
    fresh(name)
    return place.command("export", ckpt, name, *more)


def equal(a, b, what):
    check(a.keys() == b.keys(), what + ": names", str(a.keys() ^ b.keys()))
    for name in a:
        check(a[name] == b[name], f"{what}: {name} differs", f"{a[name][:2]} {b[name][:2]}")


def run_settings(case, dtype):
    c = hf.config(case)
    found = {"model.vocab_size": c["vocab_size"], "model.hidden_size": c["hidden_size"], "model.ffn_size": c["intermediate_size"],
             "model.n_layers": c["num_hidden_layers"], "model.n_heads": c["num_attention_heads"], "model.n_kv_heads": c["num_key_value_heads"],
             "model.head_dim": c["head_dim"], "model.tied": c["tie_word_embeddings"], "model.rope_theta": c["rope_theta"],
             "train.param_dtype": dtype, "route": dtype, "data.tokenizer": "unknown", "train.local_batch": 8}
    if c.get("rope_scaling"):
        found.update({"model.rope_scaling." + k.replace("_embeddings", ""): v for k, v in c["rope_scaling"].items() if k != "rope_type"})
    return found


def score(ckpt, settings, requests, *more):
    with open(place.at("requests.jsonl"), "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in requests)
    place.command("score", ckpt, "tiny.yaml", *words(settings), "--in", "requests.jsonl", "--out", "answers", *more).expect(DONE)
    with open(place.at("answers")) as f:
        return [json.loads(line) for line in f]


# ---- there and back ---------------------------------------------------------


def test_same_bytes():
    """HF -> fp4d -> HF: every tensor, and in one file the file; both layouts in, both out."""
    for case in hf.CASES:
        for dtype in ("F32", "BF16"):
            for shards in (1, 3):
                found = write("hf", case, dtype, shards)
                bring_in("hf").expect(DONE)
                take_out("hf-ckpt", "out").expect(DONE)
                c, back, files = hf.read_model(place.at("out"))
                equal(found, back, f"{case} {dtype} {shards}")
                check(files == ["model.safetensors"], "one file", str(files))
                if shards == 1:
                    with open(place.at("hf", "model.safetensors"), "rb") as a, open(place.at("out", "model.safetensors"), "rb") as b:
                        check(a.read() == b.read(), f"{case} {dtype}: the file")
                for key in hf.config(case):
                    check(c[key] == hf.config(case)[key], f"{case}: {key}", f"{c[key]} {hf.config(case)[key]}")
                check(c["torch_dtype"] == {"F32": "float32", "BF16": "bfloat16"}[dtype] and not c["attention_bias"], "config.json", str(c))
                with open(place.at("out", "generation_config.json")) as f:
                    check(json.load(f) == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": [2, 3]}, "generation_config.json")
                take_out("hf-ckpt", "out", "--shard-bytes", "9000").expect(DONE)
                _, back, files = hf.read_model(place.at("out"))
                equal(found, back, f"{case} {dtype} {shards}, in shards")
                check(len(files) > 2 and all(sum(len(t[2]) for t in hf.read_file(place.at("out", f)).values()) <= 9000 or
                                             len(hf.read_file(place.at("out", f))) == 1 for f in files), "files of 9000 bytes", str(files))


def test_new_keys():
    """config.json as transformers 5 writes it; a head beside its table; frequencies that old files carry; FP16."""
    c = hf.config("llama3")
    settings = {"rope_parameters": {**c["rope_scaling"], "rope_theta": c["rope_theta"]}, "dtype": "float16", "rope_scaling": None, "rope_theta": None}
    found = write("new", "llama3", "F16", 1, settings)
    bring_in("new", "--config", "new.yaml").expect(DONE)
    take_out("new-ckpt", "out").expect(DONE)
    written, back, _ = hf.read_model(place.at("out"))
    equal({n: ("F32", s, hf.encode(hf.decode(b, t), "F32")) for n, (t, s, b) in found.items()}, back, "FP16 becomes FP32")
    check(written["rope_scaling"] == c["rope_scaling"] and written["rope_theta"] == c["rope_theta"], "scaling is kept", str(written))
    with open(place.at("new.yaml")) as f:
        text = f.read()
    check("rope_theta: 5" in text and "original_max_position: 16" in text and "norm_eps: 1e-05" in text and "head_dim: 8" in text, "the model section", text)

    odd = {**hf.config("gqa"), "num_attention_heads": 3, "num_key_value_heads": 1}
    found = {name: ("BF16", shape, hf.encode(hf.values(name, shape), "BF16")) for name, shape in hf.shapes(odd).items()}
    hf.write_model(fresh("odd"), odd, found)
    bring_in("odd").expect(DONE)
    take_out("odd-ckpt", "out").expect(DONE, "warning: out: hidden_size 32 is no multiple of num_attention_heads 3")
    equal(found, hf.read_model(place.at("out"))[1], "three heads of 8 in a width of 32")
    place.command("inspect", "odd-ckpt/step-00000000").expect(DONE, 'imported +\\{.*"from": ?"odd"')

    def twice(t):
        t["lm_head.weight"] = t["model.embed_tokens.weight"]
        t["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", [8], bytes(32))

    found = write("twice", "tied", "BF16", 2, change=twice)
    bring_in("twice").expect(DONE)
    take_out("twice-ckpt", "out").expect(DONE)
    check(hf.read_model(place.at("out"))[1].keys() == found.keys() - {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}, "a tied head is written once, as the table")


def test_compression():
    """Imports are compressed as checkpoints are, or stored; the same numbers either way."""
    def wide(c):
        return {name: ("BF16", shape, hf.encode([0.02 * (x - (len(shape) == 1)) for x in hf.values(name, shape)], "BF16")) for name, shape in hf.shapes(c).items()}

    c = {**hf.config("gqa"), "vocab_size": 1000}
    found = wide(c)
    hf.write_model(fresh("plain"), c, found)
    size = {}
    for word in ("zstd", "store"):
        bring_in("plain", "--compression", word).expect(DONE)
        size[word] = os.path.getsize(place.at("plain-ckpt", "step-00000000", "rank-00000.h5"))
        place.command("inspect", "plain-ckpt", "--verify").expect(DONE)
        take_out("plain-ckpt", "out").expect(DONE)
        equal(hf.read_model(place.at("out"))[1], found, word)
    bring_in("plain").expect(DONE)
    check(os.path.getsize(place.at("plain-ckpt", "step-00000000", "rank-00000.h5")) == size["zstd"] < 0.95 * size["store"], "zstd is the default, and smaller", str(size))
    place.command("import", "plain", "nowhere", "--compression", "gzip").expect(USAGE, "--compression 'gzip': there are zstd and store")
    check(not os.path.exists(place.at("nowhere")), "nothing is begun")


# ---- the same model ---------------------------------------------------------


def golden():
    cases = {}
    with open(os.path.join(ROOT, "tests", "golden", "exchange.txt")) as f:
        for line in f:
            if line.startswith("case "):
                rows = cases.setdefault(line.split()[1], [])
            else:
                rows.append([float(x) for x in line.split()])
    return cases


def test_golden():
    """Log-probabilities of every id at every position, as transformers has them."""
    for case, rows in golden().items():
        if case in hf.FAR:
            continue
        ids, vocab = hf.ids(case), hf.BASE["vocab_size"]
        write("golden", case, "F32")
        bring_in("golden").expect(DONE)
        answers = score("golden-ckpt", run_settings(case, "fp32"), [{"context": ids[:t + 1], "continuation": [v]} for t in range(len(rows)) for v in range(vocab)])
        check(len(rows) == len(ids) - 1 and len(answers) == len(rows) * vocab, "all answers")
        for t, row in enumerate(rows):
            for v, wanted in enumerate(row):
                got = answers[t * vocab + v]
                check(abs(got["logprob"] - wanted) < 1e-5 and got["tokens"] == 1, f"{case}: id {v} after {t + 1}", f"{got} {wanted}")
                check(got["greedy"] == (wanted == max(row)), f"{case}: greedy, id {v} after {t + 1}", f"{got} {max(row)}")
        # whole and in parts, in an order of no length
        pieces = [(0, 1, len(ids)), (0, 9, 10), (3, 12, 18), (0, 5, len(ids)), (7, 8, 9), (0, 2, 17)]
        answers = score("golden-ckpt", run_settings(case, "fp32"), [{"context": ids[a:b], "continuation": ids[b:c]} for a, b, c in pieces], "--each")
        for (a, b, c), got in zip(pieces, answers):
            check(got["tokens"] == c - b == len(got["logprobs"]) and abs(sum(got["logprobs"]) - got["logprob"]) < 1e-5, f"{case}: sum", str(got))
            if a == 0:
                wanted = [rows[i - 1][ids[i]] for i in range(b, c)]
                check(max(abs(x - y) for x, y in zip(wanted, got["logprobs"])) < 1e-5, f"{case}: each of [{b}, {c})", f"{got} {wanted}")
                check(got["greedy"] == all(rows[i - 1][ids[i]] == max(rows[i - 1]) for i in range(b, c)), f"{case}: greedy")


def test_far():
    """At position 20,000, with llama3 scaling: the probabilities of transformers (FP64, but for its angles) and its likeliest id."""
    rows, ids = golden()["far"], hf.ids("far")
    write("far", "far", "F32")
    bring_in("far").expect(DONE)
    take_out("far-ckpt", "far-out").expect(DONE)
    out = hf.read_model(place.at("far-out"))
    check(out[0]["rope_scaling"] == hf.config("far")["rope_scaling"] and out[0]["max_position_embeddings"] == 131072, "config.json", str(out[0]))
    equal(hf.tensors("far", "F32"), out[1], "tensors")
    settings = {**run_settings("far", "fp32"), "train.seq_len": len(ids), "train.local_batch": 1, "train.global_batch": 1}
    asked = [{"context": ids[:-hf.FAR_ROWS], "continuation": ids[-hf.FAR_ROWS:]}]
    for angles in ("exact", "fp32"):
        got = score("far-ckpt", settings, asked, "--each", "--rope-angles", angles)[0]["logprobs"]
        off = max(abs(x - row[i]) for x, row, i in zip(got, rows, ids[-hf.FAR_ROWS:]))
        check(off < (1e-5 if angles == "fp32" else 1e-4), f"{angles}: off by {off}", f"{got}")
    likeliest = rows[0].index(max(rows[0]))
    check(sorted(rows[0])[-2] < max(rows[0]) - 1e-3 and likeliest < 256, "a clear choice", str(likeliest))
    text = bytes(ids[1:-hf.FAR_ROWS])
    said = subprocess.run([PROGRAM, "generate", "far-ckpt", "--tokenizer", "bytes", "--prompt", text.decode(), "--tokens", "1", "--temperature", "0", "--context", str(len(ids))],
                          cwd=place.path, env=ENVIRONMENT, capture_output=True, timeout=LIMIT)
    check(said.returncode == DONE and said.stdout == text + bytes((likeliest, 10)), "the next byte", repr(said.stdout[-20:]) + said.stderr.decode())


def trained():
    if not os.path.exists(place.at("trained")):
        place.run("trained", {"train.updates": 3})
    return place.step("trained", 3)


def test_trained():
    """A run's export: masters as they are, or rounded; the same loss when it comes back."""
    step = trained()
    take_out(step, "wide", "--dtype", "fp32").expect(DONE)
    take_out("trained", "narrow").expect(DONE)
    wide, narrow = hf.read_model(place.at("wide")), hf.read_model(place.at("narrow"))
    check({t[0] for t in wide[1].values()} == {"F32"} and {t[0] for t in narrow[1].values()} == {"BF16"}, "every tensor of the type asked for")
    for name, (_, shape, data) in wide[1].items():
        check(narrow[1][name][1:] == (shape, hf.encode(hf.decode(data, "F32"), "BF16")), name + " is not its master rounded to nearest even")
    check(any(struct.unpack_from("<I", t[2])[0] & 0xFFFF for t in wide[1].values()), "masters have more than BF16's digits")
    c = narrow[0]
    check(c["bos_token_id"] == 256 and c["eos_token_id"] == 257 and c["max_position_embeddings"] == 64 and c["rope_scaling"] is None, "config.json", str(c))

    def loss(ckpt, *more):
        place.command("eval", ckpt, "tiny.yaml", "--json", "eval.json", *more).expect(DONE)
        with open(place.at("eval.json")) as f:
            return json.load(f)["sequence_nll"]

    for name in ("narrow", "wide"):
        bring_in(name).expect(DONE)
        same(loss(name + "-ckpt"), loss(step), "loss of " + name)
    place.run("ranks", {"train.updates": 3}, 2)
    check(len(os.listdir(place.step("ranks", 3))) == 3, "a file a rank")
    take_out("ranks", "of-two").expect(DONE)
    bring_in("of-two").expect(DONE)
    same(loss("of-two-ckpt"), loss(place.step("ranks", 3)), "loss of a run of two ranks")
    take_out("narrow-ckpt", "again").expect(DONE)
    equal(hf.read_model(place.at("again"))[1], narrow[1], "a second way there and back")


def test_begin():
    """A run that begins with imported parameters: update 1's loss is theirs, moments are new, it resumes as any run."""
    step = trained()
    settings = {"train.updates": 4, "optimizer.warmup_updates": 1, "data.seed": 3}
    for dtype in ("fp32", "bf16"):
        take_out(step, "start", "--dtype", dtype).expect(DONE)
        bring_in("start").expect(DONE)
        begin = ("--resume", "start-ckpt/step-00000000")
        place.train("begun-" + dtype, {**settings, "run.stop_after_update": 2}, 0, begin).expect(75, "began from the imported parameters of start-ckpt/step-00000000")
        place.train("begun-" + dtype, settings).expect(DONE, "resumed from .*step-00000002")
        place.train("whole-" + dtype, settings, 0, begin).expect(DONE)
        same(place.updates("begun-" + dtype), place.updates("whole-" + dtype), "stopped and resumed")
        same(place.tensors("begun-" + dtype, 4), place.tensors("whole-" + dtype, 4), "tensors")
        check(place.lines("whole-" + dtype, "start")[0]["init_hash"] == place.meta("whole-" + dtype, 4)["init_hash"] != place.meta("trained", 3)["init_hash"], "hash of the beginning")
        # AdamW's first step with moments of zero moves an element by lr and its decay at most
        place.train("first-" + dtype, {**settings, "run.stop_after_update": 1}, 0, begin).expect(75)
        take_out("first-" + dtype, "first", "--dtype", "fp32").expect(DONE)
        before, after = hf.read_model(place.at("start"))[1], hf.read_model(place.at("first"))[1]
        moved = [abs(x - y) / (1 + abs(x)) for name, (t, _, data) in before.items() for x, y in zip(hf.decode(data, t), hf.decode(after[name][2], "F32"))]
        check(0.5 * 3e-3 < max(moved) < 1.01 * 3e-3, "the first step from the imported values", str(max(moved)))
        place.train("two-" + dtype, settings, 2, begin).expect(DONE)
        check([u["batch_hash"] for u in place.updates("two-" + dtype)] == [u["batch_hash"] for u in place.updates("whole-" + dtype)], "two ranks read the same")
    loss = {d: place.column("whole-" + d, "loss") for d in ("fp32", "bf16")}
    check(loss["fp32"][0] == loss["bf16"][0] and abs(loss["fp32"][3] - loss["bf16"][3]) < 0.05, "masters or their rounding", str(loss))
    check(loss["fp32"][0] < place.column("trained", "loss")[0] - 0.1, "it begins trained", str(loss))
    os.makedirs(place.at("auto"))
    shutil.copytree(place.at("start-ckpt"), place.at("auto", "checkpoints"), symlinks=True)
    place.train("auto", settings).expect(DONE, "began from the imported parameters of auto/checkpoints/step-00000000")
    same(place.updates("auto"), place.updates("whole-bf16"), "by itself")
    place.train("fp32-run", {**settings, "train.param_dtype": "fp32", "route": "fp32"}, 0, begin).expect(DONE)
    place.train("other", {**settings, "model.n_layers": 1}, 0, begin).expect(CHECKPOINT, "of another model: model.n_layers")


def test_norm_cast():
    """The cast before the gain: in FP32 the same answers, in BF16 others; of score, eval and generate alone."""
    step = trained()
    asked = [{"context": [5, 9, 77, 3], "continuation": list(range(60, 90))}]
    for dtype, other in (("fp32", False), ("bf16", True)):
        settings = {"route": dtype, "train.param_dtype": dtype}
        answers = [score(step, settings, asked, "--each", *more) for more in ((), ("--norm-cast", "after"), ("--norm-cast", "before"))]
        check(answers[0] == answers[1], "after is the default", str(answers))
        check((answers[0] != answers[2]) == other, f"{dtype}: before", str(answers))
        check(max(abs(a - b) for a, b in zip(answers[0][0]["logprobs"], answers[2][0]["logprobs"])) < 0.2, "near", str(answers))
    place.command("eval", step, "tiny.yaml", "--norm-cast", "before", "--json", "before.json").expect(DONE)
    place.command("eval", step, "tiny.yaml", "--json", "after.json").expect(DONE)
    with open(place.at("before.json")) as a, open(place.at("after.json")) as b:
        before, after = json.load(a), json.load(b)
    check(before["norm_cast"] == "before" and "norm_cast" not in after and before["loss"] != after["loss"], f"{before} {after}")
    place.command("generate", step, "--tokens", "4", "--prompt", "The ", "--norm-cast", "before").expect(DONE, "The ")
    place.command("eval", step, "tiny.yaml", "--norm-cast", "no").expect(USAGE, "--norm-cast no: before or after is wanted")
    place.command("train", "tiny.yaml", "--norm-cast", "before").expect(USAGE, "--norm-cast")


def test_rope_angles():
    """Angles in FP32: nothing at the first position, a little later on; said in eval's record."""
    step = trained()
    settings = {"route": "fp32", "train.param_dtype": "fp32"}
    asked = [{"context": [5], "continuation": [9]}, {"context": list(range(50, 90)), "continuation": list(range(60, 80))}]
    exact, same_angles, fp32 = (score(step, settings, asked, "--each", *more) for more in ((), ("--rope-angles", "exact"), ("--rope-angles", "fp32")))
    check(exact == same_angles and exact[0] == fp32[0] and exact[1] != fp32[1], "exact is the default", f"{exact} {fp32}")
    check(max(abs(a - b) for a, b in zip(exact[1]["logprobs"], fp32[1]["logprobs"])) < 1e-4, "near", f"{exact} {fp32}")
    place.command("eval", step, "tiny.yaml", "--rope-angles", "fp32", "--json", "angles.json").expect(DONE)
    with open(place.at("angles.json")) as f:
        check(json.load(f)["rope_angles"] == "fp32", "eval's record")
    place.command("generate", step, "--tokens", "4", "--prompt", "The ", "--rope-angles", "fp32").expect(DONE, "The ")
    place.command("score", step, "tiny.yaml", "--in", "requests.jsonl", "--rope-angles", "fp64").expect(USAGE, "--rope-angles fp64: fp32 or exact is wanted")


def test_padded_probability():
    """Rows that are padding: of score no part, as in the export; of eval their share, as in training, and said; never sampled."""
    place.run("wide", {"train.updates": 2, "optimizer.warmup_updates": 1, "model.vocab_size": 320})
    wide = {"model.vocab_size": 320, "route": "fp32", "train.param_dtype": "fp32"}
    asked = [{"context": [5, 77, 200], "continuation": [9, 80]}, {"context": [256, 33], "continuation": [44]}]
    cut, whole, given = (score("wide", wide, asked, "--each", *more) for more in ((), ("--vocab-size", "320"), ("--vocab-size", "258")))
    check(cut == given, "by itself and asked for", f"{cut} {given}")
    check(all(a["logprob"] > b["logprob"] + 0.01 for a, b in zip(cut, whole)), "62 rows had their share", f"{cut} {whole}")
    take_out("wide", "wide-hf", "--dtype", "fp32").expect(DONE)
    bring_in("wide-hf").expect(DONE)
    same(score("wide-hf-ckpt", {**wide, "model.vocab_size": 258}, asked, "--each"), cut, "the export's own")
    place.command("score", "wide", "tiny.yaml", *words(wide), "--in", "requests.jsonl").expect(
        DONE, "tokenizer bytes has 258 ids, the model 320 rows: those above are padding and have no part, as in an export; --vocab-size 320 gives them theirs")
    with open(place.at("requests.jsonl"), "w") as f:
        f.write('{"context": [256], "continuation": [258]}\n')
    place.command("score", "wide", "tiny.yaml", *words(wide), "--in", "requests.jsonl").expect(DATA, r"continuation\[0\] is 258, the model has ids 0 to 257")
    place.command("score", "wide", "tiny.yaml", *words(wide), "--vocab-size", "321").expect(USAGE, "--vocab-size 321: the model has 320 rows")

    says = "have their share of the probability, as in training; --vocab-size 258 leaves them out, as an export does"
    place.command("eval", "wide", "tiny.yaml", *words(wide), "--json", "all.json").expect(DONE, says)
    check(says not in place.command("eval", "wide", "tiny.yaml", *words(wide), "--vocab-size", "258", "--json", "cut.json").expect(DONE).text, "asked for, not said")
    place.command("eval", "wide-hf-ckpt", "tiny.yaml", *words({**wide, "model.vocab_size": 258}), "--json", "hf.json").expect(DONE)
    found = {}
    for name in ("all", "cut", "hf"):
        with open(place.at(name + ".json")) as f:
            found[name] = json.load(f)
    check(found["cut"]["sequence_nll"] == found["hf"]["sequence_nll"] and found["cut"]["vocab_size"] == 258 and "vocab_size" not in found["all"], "the export's", str(found))
    check(found["cut"]["loss"] < found["all"]["loss"] - 0.01, "less than all", str(found))

    # a head that would choose padding alone, were it asked
    take_out("wide", "loud", "--dtype", "fp32", "--vocab-size", "320").expect(DONE)
    c, found, _ = hf.read_model(place.at("loud"))
    t, shape, data = found["lm_head.weight"]
    rows = hf.decode(data, t)
    rows = [x * (0.01 if i < 258 * shape[1] else 100) for i, x in enumerate(rows)]
    found["lm_head.weight"] = (t, shape, hf.encode(rows, t))
    hf.write_model(fresh("louder"), c, found)
    bring_in("louder").expect(DONE)
    said = place.command("generate", "louder-ckpt", "--tokenizer", "bytes", "--prompt", "The ", "--tokens", "12").expect(DONE).text
    check(len(said.encode("utf-8", "surrogateescape").rstrip(b"\n")) > 8, "tokens have text", repr(said))


def test_padded_vocabulary():
    place.run("padded", {"train.updates": 1, "optimizer.warmup_updates": 1, "model.vocab_size": 272})
    says = r"tokenizer bytes has 258 ids, the model 272 rows: those above are padding and left out; --vocab-size 272 keeps them"
    take_out("padded", "cut", "--dtype", "fp32").expect(DONE, says)
    for name, n in (("all", 272), ("asked", 258), ("fewer", 265)):
        out = take_out("padded", name, "--dtype", "fp32", "--vocab-size", str(n)).expect(DONE).text
        check("padding" not in out, "nothing is left out but what was asked for", out)
        c, tensors, _ = hf.read_model(place.at(name))
        check(c["vocab_size"] == n and tensors["lm_head.weight"][1] == [n, 64], f"{name}: {c['vocab_size']}")
    equal(hf.read_model(place.at("asked"))[1], hf.read_model(place.at("cut"))[1], "asked for and by itself")
    (_, whole, _), (c, cut, _) = hf.read_model(place.at("all")), hf.read_model(place.at("cut"))
    check(c["vocab_size"] == 258, "config.json")
    for name in whole:
        rows = name in ("model.embed_tokens.weight", "lm_head.weight")
        check(cut[name][1] == ([258, 64] if rows else whole[name][1]) and cut[name][2] == (whole[name][2][:258 * 64 * 4] if rows else whole[name][2]), name)
    bring_in("cut").expect(DONE)
    take_out("padded", "none", "--vocab-size", "273").expect(USAGE, "--vocab-size 273: the model has 272 rows")
    take_out("padded", "none", "--vocab-size", "257").expect(USAGE, "--eos 257: the vocabulary has 257 ids")
    take_out("padded", "ids", "--bos", "5", "--eos", "6").expect(DONE)
    c = hf.read_model(place.at("ids"))[0]
    check((c["bos_token_id"], c["eos_token_id"]) == (5, 6), "ids that were given", str(c))
    # the stream gone: its tokenizer's file may be another by now, and nothing is left out
    os.rename(place.at("train.tokens"), place.at("gone.tokens"))
    try:
        take_out("padded", "unsure").expect(DONE)
    finally:
        os.rename(place.at("gone.tokens"), place.at("train.tokens"))
    check(hf.read_model(place.at("unsure"))[0]["vocab_size"] == 272, "not known: whole")
    # an import keeps the rows it came with
    bring_in("all").expect(DONE)
    take_out("all-ckpt", "back", "--dtype", "fp32").expect(DONE)
    equal(hf.read_model(place.at("all"))[1], hf.read_model(place.at("back"))[1], "an import")


# ---- files ------------------------------------------------------------------


def test_tokenizer_files():
    step = trained()
    os.makedirs(place.at("tok"), exist_ok=True)
    contents = {"tokenizer.json": b"{\"x\":\xff\0}", "tokenizer_config.json": b"{}", "special_tokens_map.json": b"", "notes.txt": b"not this"}
    for name, content in {**contents, "ranks.model": b"AA== 0\n", "config.json": b"{}"}.items():
        with open(place.at("tok", name), "wb") as f:
            f.write(content)
    take_out(step, "with", "--tokenizer", "tok", "--tokenizer", "tok/ranks.model").expect(DONE)
    check(sorted(os.listdir(place.at("with"))) == ["config.json", "generation_config.json", "model.safetensors", "ranks.model", "special_tokens_map.json",
                                                  "tokenizer.json", "tokenizer_config.json"], "files", str(os.listdir(place.at("with"))))
    with open(place.at("with", "tokenizer.json"), "rb") as f:
        check(f.read() == contents["tokenizer.json"], "byte for byte")
    take_out(step, "bad", "--tokenizer", "tok/config.json").expect(USAGE, "writes a file of that name itself")
    take_out(step, "bad", "--tokenizer", "tok", "--tokenizer", "tok/tokenizer.json").expect(USAGE, "another file of that name")
    take_out(step, "bad", "--tokenizer", "absent").expect(DATA, "absent: No such file")
    take_out(step, "bad", "--tokenizer", "corpus").expect(DATA, "holds no tokenizer's file")
    check(not os.path.exists(place.at("bad")) and not os.path.exists(place.at("bad.tmp")), "nothing is left of a refused one")


def test_byte_tokenizer():
    """scripts/byte_tokenizer.py: ids of a tokenizer.json are those of `bytes`; an export that carries it generates when it comes back."""
    subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "byte_tokenizer.py"), place.at("bytes")], check=True)
    text = "".join(map(chr, range(1, 256))) + "\r\n Gr\u00fc\u00dfe  \u4e16\u754c <|end_of_text|>\n\n"
    with open(place.at("text"), "w", encoding="utf-8", newline="") as f:
        f.write(text)
    ids = place.command("tokenize", "text", "--tokenizer", "bytes/tokenizer.json").expect(DONE).text
    check(ids.split() == [str(b) for b in text.encode()], "ids", ids)
    take_out(trained(), "speaks", "--tokenizer", "bytes").expect(DONE)
    bring_in("speaks").expect(DONE)
    words_of = [place.command("generate", k, "--prompt", "The ", "--tokens", "20").expect(DONE).text for k in ("speaks-ckpt", trained())]
    check(words_of[0] == words_of[1] and words_of[0].startswith("The "), "text", str(words_of))


def test_whole_or_not_at_all():
    step = trained()
    take_out(step, "there").expect(DONE)
    place.command("export", step, "there").expect(CHECKPOINT, "there is there already, and not an empty folder")
    os.makedirs(place.at("empty"))
    place.command("export", step, "empty/").expect(DONE)
    os.makedirs(place.at("left.tmp"))  # what a killed one leaves
    with open(place.at("left.tmp", "model.safetensors"), "w") as f:
        f.write("half")
    take_out(step, "left").expect(DONE)
    check(sorted(os.listdir(place.at("left"))) == ["config.json", "generation_config.json", "model.safetensors"] and not os.path.exists(place.at("left.tmp")), "a new one")

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))

    fresh("full")
    place.command("export", step, "full", prepare=small_files).expect(CHECKPOINT, "cannot write full.tmp/model.safetensors: File too large")
    check(not os.path.exists(place.at("full")) and not os.path.exists(place.at("full.tmp")), "nothing is left")
    fresh("full-ckpt")
    place.command("import", "there", "full-ckpt", prepare=small_files).expect(CHECKPOINT, "File too large")
    check(os.listdir(place.at("full-ckpt")) == [], "nothing is left", str(os.listdir(place.at("full-ckpt"))))
    place.command("export", "no-such", "x").expect(CHECKPOINT, "no-such")
    place.command("export", step, "x", "--dtype", "fp16").expect(USAGE, "--dtype fp16: bf16 or fp32")


def test_import_refusals():
    """Each says the tensor or the key, and leaves no checkpoint."""
    def refused(why, change=None, settings=None, case="gqa", dtype="BF16"):
        write("bad", case, dtype, 1, settings, change)
        bring_in("bad").expect(CHECKPOINT, why)
        check(not os.path.exists(place.at("bad-ckpt")) or os.listdir(place.at("bad-ckpt")) == [], "a checkpoint is there")

    q, norm, head = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"

    def replace(name, value):
        return lambda t: t.__setitem__(name, value)

    refused(f"tensor {q} is missing", lambda t: t.pop(q))
    refused(f"tensor {head} is missing", lambda t: t.pop(head))
    refused(r"tensor model.layers.1.self_attn.q_proj.bias of bad/model.safetensors is none of a Llama's", replace("model.layers.1.self_attn.q_proj.bias", ("BF16", [32], bytes(64))))
    refused(r"tensor model.layers.2.mlp.up_proj.weight .* is none", replace("model.layers.2.mlp.up_proj.weight", ("BF16", [48, 32], bytes(3072))))
    refused(rf"tensor {q} is \[32, 16\], config.json makes it \[32, 32\]", replace(q, ("BF16", [32, 16], bytes(1024))))
    refused(rf"tensor {norm} is \[32, 1\], config.json makes it \[32\]", replace(norm, ("BF16", [32, 1], bytes(64))))
    refused(rf"tensor {q} is of type F8_E4M3: only BF16, F32 and F16", replace(q, ("F8_E4M3", [32, 32], bytes(1024))))
    refused(rf"bad/model.safetensors: element 5 of tensor {norm} is nan", replace(norm, ("BF16", [32], b"\x80\x3f" * 5 + b"\xc0\x7f" + bytes(52))))
    refused("lm_head.weight is not model.embed_tokens.weight", replace(head, ("BF16", [41, 32], bytes(2624))), case="tied")
    refused(r"tensor .* is \[41, 32\], config.json makes it \[40, 32\]", settings={"vocab_size": 40})
    refused(r"config.json: attention_bias true: only false", settings={"attention_bias": True})
    refused(r"config.json: rope_scaling of type \"yarn\"", settings={"rope_scaling": {"rope_type": "yarn", "factor": 2}})
    refused(r"config.json: model_type \"gpt2\"", settings={"model_type": "gpt2"})
    two = write("bad", "gqa", "BF16", 1, change=lambda t: (t.pop(q), t.pop(norm)))
    bring_in("bad").expect(CHECKPOINT, f"tensor {q} is missing", f"tensor {norm} is missing")
    check(q not in two, "both are said at once")
    write("bad", "gqa", "BF16")
    os.truncate(place.at("bad", "model.safetensors"), os.path.getsize(place.at("bad", "model.safetensors")) - 1)
    bring_in("bad").expect(CHECKPOINT, r"bad/model.safetensors: tensor model.norm.weight: its data ends at offset")
    os.remove(place.at("bad", "config.json"))
    bring_in("bad").expect(CHECKPOINT, "bad/config.json")
    bring_in("corpus").expect(CHECKPOINT, "corpus/config.json")
    write("good", "gqa", "BF16")
    bring_in("good").expect(DONE)
    place.command("import", "good", "good-ckpt").expect(CHECKPOINT, "good-ckpt holds checkpoints already: step-00000000")
    place.command("inspect", "good-ckpt", "--verify").expect(DONE, "step-00000000")


# ---- requests of score ------------------------------------------------------


def test_requests():
    step = trained()

    def asked(line, *more):
        with open(place.at("one.jsonl"), "w") as f:
            f.write('\n{"context": [256], "continuation": [1, 2]}\n' + line + "\n")
        return place.command("score", step, "tiny.yaml", "--in", "one.jsonl", *more)

    asked('{"context": [1], "continuation": [2]}').expect(DONE, r'^\{"logprob": *-[\d.]+, *"greedy": *(true|false), *"tokens": *2\}')
    asked('{"context": [1, 258], "continuation": [2]}').expect(DATA, r"one.jsonl:3: context\[1\] is 258, the model has ids 0 to 257")
    asked('{"context": [1], "continuation": [2, -1]}').expect(DATA, r"one.jsonl:3: continuation\[1\] is -1")
    asked('{"context": [1], "continuation": [2.0]}').expect(DATA, r"one.jsonl:3: continuation\[0\] is no integer")
    asked('{"context": [], "continuation": [2]}').expect(DATA, "one.jsonl:3: context is empty", "BOS")
    asked('{"context": [1], "continuation": []}').expect(DATA, "one.jsonl:3: continuation is empty")
    asked('{"context": [1]}').expect(DATA, "one.jsonl:3: an object with the lists")
    asked('{"context": [1], "continuation": [2]').expect(DATA, "one.jsonl:3: ")
    asked('[1]').expect(DATA, "one.jsonl:3: an object with the lists")
    asked(json.dumps({"context": [1] * 60, "continuation": [2] * 5})).expect(DONE)
    asked(json.dumps({"context": [1] * 60, "continuation": [2] * 6})).expect(DATA, "one.jsonl:3: 66 ids, at most train.seq_len . 1 = 65 fit")
    place.command("score", step, "tiny.yaml", "--in", "absent").expect(DATA, "cannot open absent")
    check(place.command("score", step, "tiny.yaml").expect(DONE).text == "", "no requests from standard input, no answers")
    place.command("score", step, "tiny.yaml", np=2).expect(USAGE, "runs in one process")


def test_order_and_length():
    """Answers stand in the order of the requests, and do not depend on what is asked beside them."""
    step = trained()
    text = open(place.at("held-out", "12.txt" if os.path.exists(place.at("held-out", "12.txt")) else sorted(os.listdir(place.at("held-out")))[0]), "rb").read()
    requests = []
    for i in range(40):
        n = (i * 29) % 150 + 2
        ids = [256] + list(text[i:i + n])
        requests.append({"context": ids[:1 + (i * 7) % (len(ids) - 1)], "continuation": ids[1 + (i * 7) % (len(ids) - 1):]})
    settings = {"train.seq_len": 256, "train.local_batch": 2, "train.global_batch": 2}
    together = score(step, settings, requests)
    check(len(together) == 40 and all(a["tokens"] == len(r["continuation"]) for a, r in zip(together, requests)), "order")
    backwards = score(step, settings, requests[::-1])
    same(backwards[::-1], together, "the other way round")
    alone = score(step, settings, requests[11:12])
    same(alone, together[11:12], "alone")


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
