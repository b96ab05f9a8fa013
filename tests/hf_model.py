"""A Hugging Face Llama folder in plain Python: safetensors in and out, parameters by formula.

tests/oracle/exchange.py gives the same parameters to transformers.
"""
import json
import os
import random
import struct

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
BASE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": [2, 3]}
# What each case changes, and its positions.
CASES = {"gqa": ({}, 20), "tied": ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}, 20),
         "llama3": ({"rope_theta": 500000.0, "rope_scaling": ROPE, "num_key_value_heads": 1}, 40)}
# One that looks far back: 20,000 positions, of which the golden file has the last ones.
FAR = {"far": ({"vocab_size": 258, "rope_theta": 500000.0, "rope_scaling": {**ROPE, "original_max_position_embeddings": 8192}, "num_attention_heads": 2,
                "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 131072, "bos_token_id": 256, "eos_token_id": 257}, 20000)}
FAR_ROWS = 4

ELEMENT = {"F32": 4, "BF16": 2, "F16": 2}


def config(case):
    return {**BASE, **{**CASES, **FAR}[case][0]}


def ids(case):
    r = random.Random("ids " + case)
    if case in FAR:  # a text of printable bytes after BOS
        return [256] + [32 + int(r.random() * 95) for _ in range(FAR[case][1] - 1)]
    return [int(r.random() * BASE["vocab_size"]) for _ in range(CASES[case][1])]


def shapes(c):
    """Every tensor's name and shape, in the model's order."""
    d, f, heads, kv, dim = (c[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    found = {"model.embed_tokens.weight": [c["vocab_size"], d]}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        found.update({at + "input_layernorm.weight": [d], at + "self_attn.q_proj.weight": [heads * dim, d], at + "self_attn.k_proj.weight": [kv * dim, d],
                      at + "self_attn.v_proj.weight": [kv * dim, d], at + "self_attn.o_proj.weight": [d, heads * dim],
                      at + "post_attention_layernorm.weight": [d], at + "mlp.gate_proj.weight": [f, d], at + "mlp.up_proj.weight": [f, d],
                      at + "mlp.down_proj.weight": [d, f]})
    found["model.norm.weight"] = [d]
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = [c["vocab_size"], d]
    return found


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def values(name, shape):
    """FP32 numbers that depend on name and place alone: uniform, of a deviation that keeps attention and logits lively."""
    r, n = random.Random(name), 1
    for extent in shape:
        n *= extent
    scale = 4.0 / shape[-1] ** 0.5 if len(shape) == 2 else 0.4
    return [f32((r.random() - 0.5) * scale + (len(shape) == 1)) for _ in range(n)]


def bf16(x):
    """To nearest even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def encode(numbers, dtype):
    if dtype == "F32":
        return struct.pack(f"<{len(numbers)}f", *numbers)
    if dtype == "F16":
        return struct.pack(f"<{len(numbers)}e", *numbers)
    return struct.pack(f"<{len(numbers)}H", *map(bf16, numbers))


def decode(data, dtype):
    if dtype == "F32":
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    if dtype == "F16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]


def tensors(case, dtype):
    """name -> (dtype, shape, bytes)."""
    return {name: (dtype, shape, encode(values(case + name, shape), dtype)) for name, shape in shapes(config(case)).items()}


def write_file(path, found):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, content) in sorted(found.items()):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def write_model(folder, c, found, shards=1):
    """In one file, or dealt out to `shards` of them with an index."""
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(c, f)
    if shards == 1:
        write_file(os.path.join(folder, "model.safetensors"), found)
        return
    place = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(found)}
    for file in set(place.values()):
        write_file(os.path.join(folder, file), {n: t for n, t in found.items() if place[n] == file})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": sum(len(t[2]) for t in found.values())}, "weight_map": place}, f)


def read_file(path):
    with open(path, "rb") as f:
        content = f.read()
    n = struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8:8 + n])
    metadata = header.pop("__metadata__")
    assert metadata == {"format": "pt"} and n % 8 == 0, (metadata, n)
    places = sorted(t["data_offsets"] for t in header.values())
    assert places[0][0] == 0 and places[-1][1] == len(content) - 8 - n and all(a[1] == b[0] for a, b in zip(places, places[1:])), places
    return {name: (t["dtype"], t["shape"], content[8 + n + t["data_offsets"][0]:8 + n + t["data_offsets"][1]]) for name, t in header.items()}


def read_model(folder):
    """(config, tensors, files)."""
    with open(os.path.join(folder, "config.json")) as f:
        c = json.load(f)
    files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
    found = {}
    for file in files:
        part = read_file(os.path.join(folder, file))
        assert not found.keys() & part.keys()
        found.update(part)
    if files != ["model.safetensors"]:
        with open(os.path.join(folder, "model.safetensors.index.json")) as f:
            index = json.load(f)
        assert index["weight_map"].keys() == found.keys() and set(index["weight_map"].values()) == set(files)
        assert index["metadata"]["total_size"] == sum(len(t[2]) for t in found.values())
    return c, found, files
