#!/usr/bin/env python3
"""`export`, `import` and `score` beside transformers on the CPU.

    BUILD=build python3 tests/peer/transformers_llama.py [--long] [NAME...]

Needs torch, transformers and safetensors, and of the build `fp4d` and `tests/exchange_logits_main`.
Of each case a model with random parameters is made by transformers and saved; imported; exported
again, whole and in shards; loaded by transformers from the export; then

  bytes    tensors of the export equal those of the first model, file by file, to the bit
  logits   ours and transformers', every position, every id: largest |difference|
  score    `fp4d score` and log_softmax of transformers' logits: largest |difference|, greedy equal

(tests/peer/llama_peer.py) in FP32 and, as the same parameters in BF16, beside transformers' own distance from the FP32 result.
transformers takes the angles of rotary embeddings in FP32, which leaves one of 8,191 off by up to
2.4e-4; fp4d takes them in FP64, and in FP32 where --rope-angles says so.  So the limit in FP32,
1e-5 + 1e-5 |logit| for every logit, holds between fp4d with FP32 angles and transformers as it is, and
between fp4d as it is and transformers given FP64 angles, and FP64 throughout.
--long adds 8,192 positions with head_dim 128, and `far`: beyond position 20,000 transformers, from the export,
and `fp4d generate`, with either angles, choose the same tokens, none of them by less than FAR_MARGIN.
"""
import functools
import os
import shutil
import subprocess
import sys
import tempfile

import torch
from llama_peer import PROGRAM, Angles, compare_scores, ours, requests, run, same_bytes, score, write_run
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# name: (vocab, hidden, ffn, layers, heads, kv heads, head_dim, tied, theta, original_max_position or None, positions)
CASES = {
    "gqa": (131, 48, 80, 2, 4, 2, 12, False, 1e4, None, 96),
    "gqa-tied": (258, 66, 96, 2, 6, 2, 16, True, 1e4, None, 130),
    "gqa-llama3": (131, 64, 80, 3, 8, 2, 16, False, 5e5, 64, 256),
    "mqa-tied-llama3": (97, 56, 72, 2, 4, 1, 32, True, 5e5, 32, 200),
}
FAR, FAR_TOKENS, FAR_MARGIN = 20016, 6, 1e-3  # positions of the prompt, tokens after it, between the likeliest two logits
LONG = {"long-128-tied-llama3": (131, 256, 384, 2, 4, 2, 128, True, 5e5, 2048, 8192)}


def gain_before_cast(norm, x):
    wide = x.float()
    return (norm.weight.float() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)).to(x.dtype)


@torch.no_grad()
def logits_of(folder, config, dtype, angles=False):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=config._attn_implementation)
    if angles:
        model.model.rotary_emb = Angles(config)
    return model, lambda ids: model(ids[None]).logits[0]


@torch.no_grad()
def case(name, shape):
    vocab, hidden, ffn, layers, heads, kv, dim, tied, theta, original, positions = shape
    rope = {**LLAMA3, "original_max_position_embeddings": original, "rope_theta": theta} if original else {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv, head_dim=dim, tie_word_embeddings=tied, rope_parameters=rope, rms_norm_eps=1e-5,
                         max_position_embeddings=positions, bos_token_id=1, eos_token_id=[2, 3], attn_implementation="eager" if positions < 4096 else "sdpa")
    torch.manual_seed(len(name))
    hot = 2.0 if positions < 4096 else 1.0  # beyond that FP32 itself is further than the limit from FP64
    model = LlamaForCausalLM(config)
    for key, p in model.named_parameters():  # larger than initial values, so that attention is not flat; logits of the order of 1
        scale = hot if "q_proj" in key or "k_proj" in key else 0.25 if "embed" in key or "lm_head" in key else 1.0
        p.copy_(1 + 0.2 * torch.randn(p.shape) if p.dim() == 1 else torch.randn(p.shape) * scale / p.shape[1] ** 0.5)
    ids = torch.randint(0, vocab, (positions,))
    place = tempfile.mkdtemp()
    lines = []
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        at = lambda word: os.path.join(place, word + "-" + dtype)
        model = model.to(kind)
        model.save_pretrained(at("hf"))
        yaml = os.path.join(place, "model.yaml")
        run(PROGRAM, "import", at("hf"), at("ckpt"), "--config", yaml)
        write_run(os.path.join(place, dtype + ".yaml"), yaml, dtype, positions)
        run(PROGRAM, "export", at("ckpt"), at("out"), "--shard-bytes", "0")
        run(PROGRAM, "export", at("ckpt"), at("shards"), "--shard-bytes", "40000")
        n, shards = same_bytes(at("hf"), at("out")), sum(f.endswith(".safetensors") for f in os.listdir(at("shards")))
        same_bytes(at("hf"), at("shards"))
        with open(os.path.join(at("hf"), "model.safetensors"), "rb") as a, open(os.path.join(at("out"), "model.safetensors"), "rb") as b:
            whole = a.read() == b.read()
        run(PROGRAM, "import", at("shards"), at("again"))
        run(PROGRAM, "export", at("again"), at("out2"))
        same_bytes(at("hf"), at("out2"))
        theirs = AutoModelForCausalLM.from_pretrained(at("shards"), attn_implementation=config._attn_implementation)
        assert theirs.dtype == kind and theirs.config.eos_token_id == [2, 3] and theirs.config.bos_token_id == 1
        assert dict(theirs.config.rope_parameters) == rope, theirs.config.rope_parameters
        logits, mine = theirs(ids[None]).logits[0].float(), ours(place, dtype, ids)
        largest, off = float(logits.abs().max()), float((mine - logits).abs().max())
        asked = requests(ids, vocab)
        worst, each = compare_scores(theirs, asked, score(place, dtype, asked))
        lines.append(f"{name} {dtype}: {n} tensors equal ({shards} shards; file {'equal' if whole else 'differs'}); logits: largest {largest:.3f}, off by {off:.3g}, "
                     f"first and last position {float((mine - logits)[0].abs().max()):.3g} {float((mine - logits)[-1].abs().max()):.3g}; score off by {worst:.3g} of the sum, {each:.3g} a token")
        rms = lambda x: float(x.double().square().mean().sqrt())
        if dtype == "fp32":
            exact = logits_of(at("out"), config, torch.float64, True)[1](ids)
            with_angles = logits_of(at("out"), config, torch.float32, True)[1](ids)
            beyond = lambda a, b: float(((a - b).abs() - 1e-5 * b.abs()).max())
            apart = lambda a, b: float((a - b).abs().max())
            as_theirs = ours(place, dtype, ids, "after", "fp32")
            lines.append(f"{name} fp32, largest distance from FP64: transformers {apart(logits, exact):.3g}, with FP64 angles {apart(with_angles, exact):.3g}, "
                         f"fp4d {apart(mine, exact):.3g}; fp4d from transformers with FP64 angles {apart(mine, with_angles):.3g}")
            lines.append(f"{name} fp32, --rope-angles fp32: fp4d from transformers {apart(as_theirs, logits):.3g}, by default {apart(mine, logits):.3g}")
            assert beyond(mine, with_angles) <= 1e-5 and beyond(mine, exact) <= 1e-5 and beyond(as_theirs, logits) <= 1e-5, "\n".join(lines)
        else:
            exact = logits_of(at("out"), config, torch.float32)[1](ids)
            a, b = rms(logits - exact), rms(mine - exact)
            lines.append(f"{name} bf16, RMS distance from the same parameters in FP32: transformers {a:.4g}, fp4d {b:.4g}; between them {rms(mine - logits):.4g}")
            gain = logits_of(at("out"), config, torch.bfloat16)
            for module in gain[0].modules():
                if isinstance(module, LlamaRMSNorm):
                    module.forward = functools.partial(gain_before_cast, module)
            other = gain[1](ids).float()
            lines.append(f"{name} bf16, RMSNorm's gain before the cast, as fp4d: transformers changes by {rms(other - logits):.4g} RMS, {float((other - logits).abs().max()):.3g} at most; "
                         f"from FP32 {rms(other - exact):.4g}; from fp4d {rms(mine - other):.4g}")
            assert b <= 1.25 * a, lines[-1]
            cast = ours(place, dtype, ids, "before")
            lines.append(f"{name} bf16, --norm-cast before: fp4d from transformers {rms(cast - logits):.4g} RMS, by default {rms(mine - logits):.4g}; "
                         f"from FP32 {rms(cast - exact):.4g}")
            assert rms(cast - logits) < rms(mine - logits), lines[-1]
    shutil.rmtree(place)
    print("\n".join(lines), flush=True)


@torch.no_grad()
def far():
    place = tempfile.mkdtemp()
    at = lambda word: os.path.join(place, word)
    config = LlamaConfig(vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         tie_word_embeddings=False, rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 5e5}, rms_norm_eps=1e-5,
                         max_position_embeddings=131072, bos_token_id=256, eos_token_id=257)
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    for key, p in model.named_parameters():
        p.copy_(1 + 0.2 * torch.randn(p.shape) if p.dim() == 1 else torch.randn(p.shape) * (3 if "q_proj" in key or "k_proj" in key else 2) / p.shape[1] ** 0.5)
    model.save_pretrained(at("hf"))
    run(PROGRAM, "import", at("hf"), at("ckpt"))
    run(PROGRAM, "export", at("ckpt"), at("out"))
    same_bytes(at("hf"), at("out"))
    theirs = AutoModelForCausalLM.from_pretrained(at("out"), attn_implementation="sdpa")
    text = bytes((32 + torch.randint(0, 95, (FAR - 1,))).tolist())
    ids, margins = torch.tensor([[256, *text]]), []
    for _ in range(FAR_TOKENS):
        best = theirs(ids, logits_to_keep=1).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.cat((ids, best.indices[None, :1]), 1)
    chosen = ids[0, FAR:].tolist()
    assert min(margins) > FAR_MARGIN and max(chosen) < 256, (margins, chosen)
    for angles in ("exact", "fp32"):
        said = subprocess.run([PROGRAM, "generate", at("ckpt"), "--tokenizer", "bytes", "--prompt", text.decode(), "--tokens", str(FAR_TOKENS), "--temperature", "0",
                               "--context", str(FAR + FAR_TOKENS), "--rope-angles", angles], capture_output=True, check=True).stdout
        assert said == text + bytes(chosen) + b"\n", (angles, chosen, list(said[len(text):]))
    shutil.rmtree(place)
    print(f"far: {FAR_TOKENS} greedy tokens after {FAR} positions equal, either angles: {chosen}; the smallest margin of two logits {min(margins):.3g}", flush=True)


if __name__ == "__main__":
    names = [a for a in sys.argv[1:] if not a.startswith("-")]
    chosen = {**CASES, **(LONG if "--long" in sys.argv else {})}
    for name, shape in chosen.items():
        if not names or name in names:
            case(name, shape)
    if "--long" in sys.argv and (not names or "far" in names):
        far()
