#!/usr/bin/env python3
"""The peer: the same Llama, batch and optimizer in PyTorch on the CPU.

  tests/peer/pytorch_cpu.py [--dtype fp32|bf16] [--compile] [--threads N] [--updates N]
                            [shape options; the defaults are configs/demo.yaml]

Prints one line of JSON: tokens per second (median and best update).  FP32 runs
everything in float32; bf16 is autocast over FP32 weights, as PyTorch users
train on CPUs.  Data are random ids: only the time counts.
"""
import argparse
import json
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a
        width = (a.heads + 2 * a.kv_heads) * a.head_dim
        self.attention_norm = nn.RMSNorm(a.hidden, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(a.hidden, eps=1e-5)
        self.wqkv = nn.Linear(a.hidden, width, bias=False)
        self.wo = nn.Linear(a.heads * a.head_dim, a.hidden, bias=False)
        self.w13 = nn.Linear(a.hidden, 2 * a.ffn, bias=False)
        self.w2 = nn.Linear(a.ffn, a.hidden, bias=False)

    def rotate(self, x, cos, sin):
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def forward(self, x, cos, sin):
        a = self.a
        batch, length, _ = x.shape
        q, k, v = self.wqkv(self.attention_norm(x)).split(
            [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim], -1)
        q = self.rotate(q.view(batch, length, a.heads, a.head_dim).transpose(1, 2), cos, sin)
        k = self.rotate(k.view(batch, length, a.kv_heads, a.head_dim).transpose(1, 2), cos, sin)
        v = v.view(batch, length, a.kv_heads, a.head_dim).transpose(1, 2)
        k = k.repeat_interleave(a.heads // a.kv_heads, 1)
        v = v.repeat_interleave(a.heads // a.kv_heads, 1)
        o = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.wo(o.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, -1)
        return x + self.w2(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embedding = nn.Embedding(a.vocab, a.hidden)
        self.blocks = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.norm = nn.RMSNorm(a.hidden, eps=1e-5)
        self.head = nn.Linear(a.hidden, a.vocab, bias=False)
        angle = torch.arange(a.seq)[:, None] * 10000.0 ** (-torch.arange(0, a.head_dim, 2) / a.head_dim)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--updates", type=int, default=20)
    for name, value in [("vocab", 258), ("hidden", 192), ("ffn", 512), ("layers", 4), ("heads", 6), ("kv_heads", 2),
                        ("seq", 256), ("batch", 8), ("accumulation", 2)]:
        p.add_argument("--" + name, type=int, default=value)
    a = p.parse_args()
    a.head_dim = a.hidden // a.heads
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(1)
    model = Llama(a)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = torch.compile(model) if a.compile else model
    ids = torch.randint(a.vocab, (a.accumulation, a.batch, a.seq + 1))
    seconds, loss = [], 0.0
    for update in range(a.updates + 3):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for part in ids:
            with torch.autocast("cpu", torch.bfloat16, enabled=a.dtype == "bf16"):
                loss = step(part[:, :-1], part[:, 1:]) / a.accumulation
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update >= 3:
            seconds.append(time.perf_counter() - started)
    assert math.isfinite(float(loss.detach()))
    tokens = a.accumulation * a.batch * a.seq
    seconds.sort()
    print(json.dumps({"peer": "pytorch " + torch.__version__, "dtype": a.dtype, "compile": a.compile,
                      "threads": torch.get_num_threads(), "parameters": sum(t.numel() for t in model.parameters()),
                      "tokens_per_second_median": tokens / seconds[len(seconds) // 2],
                      "tokens_per_second_best": tokens / seconds[0]}))


if __name__ == "__main__":
    main()
