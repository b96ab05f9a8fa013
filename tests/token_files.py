"""Token files as other trainers write them, a reader of our streams, and a small corpus: from the
formats' definitions alone.  Standard library only."""
import array
import base64
import json
import os
import struct

BOS, EOS, VOCAB = 256, 257, 258  # of the byte tokenizer


# ---- a corpus that is the same everywhere ------------------------------------


class Draw:
    """Numbers of a 64-bit linear congruence."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % n


def text(draw, words):
    return " ".join("".join("etaoinshrdlu"[draw.below(12)] for _ in range(1 + draw.below(8))) for _ in range(words)).encode()


def corpus(seed, documents, longest=60):
    draw = Draw(seed)
    return [text(draw, 1 + draw.below(longest)) for _ in range(documents)]


def write_texts(folder, documents):
    os.makedirs(folder)
    for i, document in enumerate(documents):
        with open(os.path.join(folder, f"{i:04d}.txt"), "wb") as f:
            f.write(document)


def encode(document, bos=True, eos=True):
    return [BOS] * bos + list(document) + [EOS] * eos


# ---- tokenizers of 256 bytes: their ids are the bytes' values ---------------------


def write_rank_file(path):
    with open(path, "w") as f:
        for i in range(256):
            f.write(base64.b64encode(bytes([i])).decode() + f" {i}\n")


def write_tokenizer_json(path, specials):
    """Hugging Face's byte-level BPE without a merge, and named specials from 256 on."""
    shown = {}
    for b in list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256)):
        shown[b] = chr(b)
    for b in range(256):
        shown.setdefault(b, chr(256 + len([c for c in shown.values() if ord(c) > 255])))
    added = [{"id": 256 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for i, name in enumerate(specials)]
    with open(path, "w") as f:
        json.dump({"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                   "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                   "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                   "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                             "fuse_unk": False, "byte_fallback": False, "vocab": {c: b for b, c in shown.items()}, "merges": []}}, f)


# ---- token files -------------------------------------------------------------


def ids_bytes(ids, size):
    out = array.array({2: "H", 4: "I"}[size], ids)
    assert out.itemsize == size
    return out.tobytes()


def write_raw(path, documents, size=2):
    """nanoGPT, and OLMo's headerless .npy: ids and nothing else."""
    with open(path, "wb") as f:
        for ids in documents:
            f.write(ids_bytes(ids, size))


def write_npy(path, values, kind="<i8"):
    """A true .npy of one axis, format 1.0."""
    code = {"<i8": "q", "<u2": "H", "<u4": "I", "<i4": "i"}[kind]
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({len(values)},), }}"
    header += " " * (-(11 + len(header)) % 64) + "\n"
    with open(path, "wb") as f:
        f.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + array.array(code, values).tobytes())


def write_titan(path, offsets_path, documents):
    """A u32 memmap and offsets.npy with an entry more than documents."""
    write_raw(path, documents, 4)
    ends = [0]
    for ids in documents:
        ends.append(ends[-1] + len(ids))
    write_npy(offsets_path, ends)


def write_megatron(prefix, documents, size=4):
    """PREFIX.bin and PREFIX.idx; a sequence a document."""
    write_raw(prefix + ".bin", documents, size)
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, {4: 4, 2: 8}[size], len(documents), len(documents) + 1))
        f.write(array.array("i", [len(d) for d in documents]).tobytes())
        at, offsets = 0, []
        for ids in documents:
            offsets.append(at)
            at += size * len(ids)
        f.write(array.array("q", offsets).tobytes() + array.array("q", range(len(documents) + 1)).tobytes())


def write_llmc(path, documents, size=2):
    """Its two kinds: GPT-2's u16 and Llama-3's u32."""
    magic, version = {2: (20240520, 1), 4: (20240801, 7)}[size]
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", magic, version, sum(map(len, documents)), *[0] * 253))
        for ids in documents:
            f.write(ids_bytes(ids, size))


# ---- our streams ---------------------------------------------------------------


class Stream:
    """A token stream of version 2, docs/formats.md, read without its digests."""

    def __init__(self, path):
        with open(path, "rb") as f:
            data = f.read()
        assert data[:8] == b"\x89FP4DTK\n" and data[-8:] == b"FP4DEND\n", path
        self.version, header, size, self.vocab_size, tokens, documents, _ = struct.unpack_from("<IIIIQQQ", data, 8)
        self.bos, self.eos, sources = struct.unpack_from("<iiI", data, 112)
        at = header
        self.ids = array.array({2: "H", 4: "I"}[size], data[at:at + size * tokens]).tolist()
        at += -(-size * tokens // 8) * 8
        self.first = array.array("Q", data[at:at + 8 * (documents + 1)]).tolist()
        at += 8 * (documents + 1)
        self.source = list(data[at:at + documents])
        text_bytes = struct.unpack_from("<Q", data, len(data) - 32)[0]
        lines = data[-64 - text_bytes:-64].decode().splitlines()
        self.sources = [line.split("\t")[:3] for line in lines[:sources]]  # name, documents, tokens
        assert len(lines) in (sources, sources + 1) and self.version == 2, path

    @property
    def documents(self):
        return [self.ids[a:b] for a, b in zip(self.first, self.first[1:])]
