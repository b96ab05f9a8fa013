#!/usr/bin/env python3
"""Golden log-probabilities of small Llamas: transformers in FP64.

    python3 tests/oracle/exchange.py > tests/golden/exchange.txt

Needs torch and transformers.  tests/hf_model.py gives configurations, parameters and token ids.
For each case a line `case NAME`, then for every position but the last a line: log-probabilities of
all ids at the next one; of the far case for the last FAR_ROWS of these positions.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_model


@torch.no_grad()
def main():
    for case in (*hf_model.CASES, *hf_model.FAR):
        c = hf_model.config(case)
        rope = {"rope_type": "default", **c.pop("rope_scaling", {}), "rope_theta": c.pop("rope_theta")}
        model = LlamaForCausalLM(LlamaConfig(**c, rope_parameters=rope, attn_implementation="sdpa" if case in hf_model.FAR else "eager")).double()
        parameters = dict(model.named_parameters())
        shapes = hf_model.shapes(hf_model.config(case))
        assert parameters.keys() == shapes.keys(), parameters.keys() ^ shapes.keys()
        for name, shape in shapes.items():
            parameters[name].copy_(torch.tensor(hf_model.values(case + name, shape), dtype=torch.float64).view(shape))
        rows = torch.log_softmax(model(torch.tensor([hf_model.ids(case)])).logits[0], -1)
        print("case", case)
        for row in rows[-1 - hf_model.FAR_ROWS if case in hf_model.FAR else 0:-1].tolist():
            print(*(f"{x:.6f}" for x in row))


main()
