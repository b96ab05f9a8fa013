"""Golden rotary embeddings of Hugging Face transformers, for tests/cpu_rope_test.c.

    python tests/oracle/rope.py > tests/golden/rope.txt

LlamaRotaryEmbedding's tables and apply_rotary_pos_emb's result in FP32.  They
pair element i with i + head_dim/2 (`rotate_half`), we 2i with 2i + 1: element i
of theirs is our 2i, i + head_dim/2 our 2i + 1.

For each case a line  NAME HEAD_DIM THETA SCALED FACTOR LOW HIGH ORIGINAL,  then for each of POSITIONS
and each pair a line  POSITION PAIR  COS SIN  Q0 Q1  R0 R1: FP32 bits; Q are numbers that BF16 holds.
"""
import numpy as np
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

POSITIONS = (0, 1, 8191)
CASES = (
    ("llama-3", 128, 500000.0, None),
    ("llama-3.1", 128, 500000.0, (8.0, 1.0, 4.0, 8192)),
    ("llama-3.2-1b", 64, 500000.0, (32.0, 1.0, 4.0, 8192)),
)


def bits(x):
    return f"{np.float32(x).view(np.uint32):08x}"


def main():
    torch.manual_seed(3)
    for name, dim, theta, scaling in CASES:
        rope = {"rope_type": "default", "rope_theta": theta}
        if scaling:
            rope.update(rope_type="llama3", factor=scaling[0], low_freq_factor=scaling[1], high_freq_factor=scaling[2],
                        original_max_position_embeddings=scaling[3])
        config = LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, num_key_value_heads=1, head_dim=dim,
                             max_position_embeddings=131072, rope_parameters=rope)
        q = torch.randn(1, 1, len(POSITIONS), dim).bfloat16().float()
        cos, sin = LlamaRotaryEmbedding(config)(q, torch.tensor([POSITIONS]))
        r, _ = apply_rotary_pos_emb(q, q, cos, sin)
        print(name, dim, theta, int(scaling is not None), *(scaling or (1.0, 1.0, 2.0, 1)))
        for t, position in enumerate(POSITIONS):
            for i in range(dim // 2):
                other = i + dim // 2
                print(position, i, bits(cos[0, t, i]), bits(sin[0, t, i]), bits(q[0, 0, t, i]), bits(q[0, 0, t, other]),
                      bits(r[0, 0, t, i]), bits(r[0, 0, t, other]))


main()
