"""What the comparisons of `export`, `import`, `score` and `generate` with transformers share.

BUILD names the build folder (default build); of it `fp4d` and `tests/exchange_logits_main` are run.
"""
import json
import os
import subprocess
import sys

import torch
from safetensors.torch import load_file

BUILD = os.path.abspath(os.environ.get("BUILD", "build"))
PROGRAM = os.path.join(BUILD, "fp4d")
LOGITS = os.path.join(BUILD, "tests", "exchange_logits_main")


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def tensors(folder):
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            found.update(load_file(os.path.join(folder, name)))
    return found


def same_bytes(a, b):
    a, b = tensors(a), tensors(b)
    assert a.keys() == b.keys(), (a.keys() ^ b.keys())
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name
    return len(a)


def write_run(path, yaml, dtype, positions):
    with open(path, "w") as f:
        f.write(open(yaml).read() + f"""
train: {{param_dtype: {dtype}, master: false, seq_len: {positions}, local_batch: 1, global_batch: 1}}
data: {{train: none, tokenizer: unknown}}
route: {dtype}
""")


def ours(place, dtype, ids, *parity):
    """`parity`: words of --norm-cast and --rope-angles."""
    with open(os.path.join(place, "ids"), "wb") as f:
        f.write(ids.to(torch.int32).numpy().tobytes())
    run(LOGITS, os.path.join(place, "ckpt-" + dtype), os.path.join(place, dtype + ".yaml"), os.path.join(place, "ids"), os.path.join(place, "logits"), *parity)
    with open(os.path.join(place, "logits"), "rb") as f:
        return torch.frombuffer(bytearray(f.read()), dtype=torch.float32).view(len(ids), -1)


def requests(ids, vocab):
    """Contexts and continuations of every kind of length; the last one is the whole."""
    g = torch.Generator().manual_seed(9)
    found, n = [], len(ids)
    for k in range(24):
        first = int(torch.randint(0, n - 2, (1,), generator=g)) if k < 20 else 0
        end = int(torch.randint(first + 2, min(n, first + 2 + (8 << (k % 6))) + 1, (1,), generator=g))
        cut = int(torch.randint(first + 1, end, (1,), generator=g))
        found.append((ids[first:cut].tolist(), ids[cut:end].tolist()))
    return found + [(ids[:1].tolist(), ids[1:].tolist())]


def score(place, dtype, asked, *more):
    path = os.path.join(place, "requests.jsonl")
    with open(path, "w") as f:
        for context, continuation in asked:
            f.write(json.dumps({"context": context, "continuation": continuation}) + "\n")
    text = run(PROGRAM, "score", os.path.join(place, "ckpt-" + dtype), os.path.join(place, dtype + ".yaml"), "--in", path, "--each",
               "--set", "train.global_batch=2", "--set", "train.local_batch=2", *more)
    return [json.loads(line) for line in text.splitlines()]


class Angles(torch.nn.Module):
    """transformers' rotary embedding with its angles, cosines and sines in FP64."""

    def __init__(self, config):
        super().__init__()
        rope = config.rope_parameters
        inverse = float(rope["rope_theta"]) ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
        if rope["rope_type"] == "llama3":
            turns = rope["original_max_position_embeddings"] * inverse / (2 * torch.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            share = ((turns - low) / (high - low)).clamp(0, 1)
            inverse = share * inverse + (1 - share) * inverse / rope["factor"]
        self.inverse = inverse

    def forward(self, x, position_ids):
        angles = position_ids[0].double()[:, None] * self.inverse
        angles = torch.cat((angles, angles), -1)[None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@torch.no_grad()
def compare_scores(model, asked, answers):
    worst = each = 0.0
    for (context, continuation), answer in zip(asked, answers, strict=True):
        logits = model(torch.tensor([context + continuation])).logits[0].float().double()
        rows = logits[len(context) - 1:-1]
        wanted = torch.tensor(continuation)
        logprobs = torch.log_softmax(rows, -1)[torch.arange(len(wanted)), wanted]
        worst = max(worst, abs(float(logprobs.sum()) - answer["logprob"]) / max(1.0, abs(float(logprobs.sum()))))
        each = max(each, float((logprobs - torch.tensor(answer["logprobs"], dtype=torch.float64)).abs().max()))
        margin = rows.topk(2).values
        if float((margin[:, 0] - margin[:, 1]).min()) > 1e-4:  # no tie that rounding could decide
            assert bool((rows.argmax(-1) == wanted).all()) == answer["greedy"]
    return worst, each


