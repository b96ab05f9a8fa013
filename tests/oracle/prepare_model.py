"""What `fp4d prepare` makes of a corpus, byte for byte: docs/formats.md in plain Python.

Independent of data/: text by Python's json and UTF-8 decoder, hashes by the xxHash library (libxxhash.so.0),
everything held in memory.  Tokens are bytes, or what `encode` makes of them.  Used by tests/data_prepare_model_test.py.
"""
import ctypes
import gzip
import json
import os
import re
import struct
import subprocess


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


_library = ctypes.CDLL("libxxhash.so.0")
_library.XXH3_128bits.restype = _Hash128
_library.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def xxh(data):
    """(high, low)"""
    h = _library.XXH3_128bits(data, len(data))
    return h.high, h.low


def words(h):
    return struct.pack("<QQ", *h)


# ---- text ---------------------------------------------------------------------


def read(path):
    with open(path, "rb") as f:
        data = f.read()
    if path.endswith(".gz"):
        return gzip.decompress(data)
    if path.endswith(".zst"):
        return subprocess.run(["zstd", "-dc", path], stdout=subprocess.PIPE, check=True).stdout
    return data


def files_of(path):
    if not os.path.isdir(path):
        return [path]
    found = []
    for name in sorted(os.listdir(path), key=os.fsencode):
        inside = os.path.join(path, name)
        if name.startswith(".") or (os.path.isdir(inside) and os.path.islink(inside)):
            continue
        if os.path.isdir(inside) or re.search(r"\.(txt|md|rst|jsonl|ndjson)(\.gz|\.zst)?$", name):
            found += files_of(inside)
    return found


def records(path, key):
    """Texts as (bytes, number of lone surrogates)."""
    data = read(path)
    if data[:3] == b"\xef\xbb\xbf":
        data = data[3:]
    if not re.search(r"\.(jsonl|ndjson)(\.gz|\.zst)?$", path):
        yield data, 0
        return
    for line in data.split(b"\n"):
        if not line.strip(b" \t\r"):
            continue
        text = json.loads(line.decode("utf-8", "surrogateescape"))[key]
        # Bytes that are no UTF-8 come as DC80..DCFF; escapes of halves too, and the tests keep those apart.
        lone = sum(0xD800 <= ord(c) < 0xDC80 for c in text)
        text = "".join("\ufffd" if 0xD800 <= ord(c) < 0xDC80 else c for c in text)
        yield text.encode("utf-8", "surrogateescape"), lone


def apply_policy(text, lone, policy, any_bytes):
    """The text, or None: dropped."""
    try:
        text.decode()
        valid = True
    except UnicodeDecodeError:
        valid = False
    if valid and not lone:
        return text
    if policy == "drop":
        return None
    return text if any_bytes else text.decode("utf-8", "replace").encode()


def normalised(text):
    text = re.sub(rb"[ \t\n\v\f\r]+", b" ", text).strip(b" ")
    return bytes(c + 32 if 65 <= c <= 90 else c for c in text)


# ---- order ---------------------------------------------------------------------


def held_out(content, fraction):
    return (xxh(b"holdout\0" + bytes(8) + words(content))[0] >> 11) / 2.0**53 < fraction


def order_key(seed, turn, content):
    return xxh(b"order\0\0\0" + struct.pack("<QQ", seed, turn) + words(content))


def documents_of(settings):
    """(source, ids, content, ordinal) of every document that is kept, in the order of files."""
    seen, kept, ordinal = set(), [], -1
    for number, source in enumerate(settings["sources"]):
        for path in files_of(source["path"]):
            for text, lone in records(path, source.get("text_key", "text")):
                ordinal += 1
                if not text:
                    continue
                text = apply_policy(text, lone, settings.get("invalid_utf8", "replace"), "encode" not in settings)
                if text is None:
                    continue
                if settings.get("dedup", "exact") != "none":
                    same = normalised(text)
                    if same in seen:
                        continue
                    seen.add(same)
                ids = settings["encode"](text) if "encode" in settings else list(text)
                ids = settings["before"] + ids + settings["after"]
                kept.append((number, ids, xxh(struct.pack(f"<{len(ids)}I", *ids)), ordinal))
    return kept


def arranged(documents, seed, turn, shuffled):
    if not shuffled:
        return sorted(documents, key=lambda d: d[3])
    return sorted(documents, key=lambda d: (order_key(seed, turn, d[2]), d[2], d[0], d[3]))


def mix(documents, settings, validation):
    seed = 0 if validation else settings.get("seed", 1)
    shuffled = settings.get("shuffle_documents", True)
    sources = settings["sources"]
    stages = settings.get("stages")
    target = 0 if validation else settings.get("tokens", 0)
    if not stages and not any(s.get("weight") for s in sources):
        out = []
        for d in arranged(documents, seed, 0, shuffled):
            if target and sum(len(x[1]) for x in out) >= target:
                break
            out.append(d)
        return out
    stages = stages or [(0, [s["weight"] for s in sources])]
    stages = stages[:1] if validation else stages
    mine = [[d for d in documents if d[0] == i] for i in range(len(sources))]
    whole = [sum(len(d[1]) for d in docs) for docs in mine]
    limit = [1 if validation else s.get("max_repetition", 1) for s in sources]
    queue, turn = [[] for _ in sources], [0] * len(sources)
    used, taken, n, total, at, out = [0] * len(sources), [0] * len(sources), 0, 0, 0, []
    while not (target and total >= target):
        weights = [w / sum(stages[at][1]) for w in stages[at][1]]
        best = None
        for i, w in enumerate(weights):
            deficit = w * (n + 1) - taken[i]
            if w > 0 and (best is None or deficit > best[0]):
                best = (deficit, i)
        i = best[1]
        if not used[i] < limit[i] * whole[i]:
            break
        if not queue[i]:
            queue[i] = arranged(mine[i], seed, turn[i], shuffled)
            turn[i] += 1
        d = queue[i].pop(0)
        out.append(d)
        for counts in (used, taken):
            counts[i] += len(d[1])
        n += len(d[1])
        total += len(d[1])
        while at + 1 < len(stages) and total >= stages[at + 1][0]:
            at, n, taken = at + 1, 0, [0] * len(sources)
    return out


# ---- the file ------------------------------------------------------------------


def stream(documents, settings):
    """The bytes of a token stream, version 2."""
    vocab, sources = settings.get("vocab", 258), settings["sources"]
    width = "H" if vocab <= 65536 else "I"
    tokens = sum(len(d[1]) for d in documents)
    name = settings.get("tokenizer_name", "bytes").encode()
    header = b"\x89FP4DTK\n" + struct.pack("<IIIIQQQ", 2, 256, struct.calcsize(width), vocab, tokens, len(documents), 1 << 20)
    header += name.ljust(64, b"\0") + struct.pack("<iiI", settings["bos"], settings["eos"], len(sources))
    header = header.ljust(256, b"\0")
    payload = b"".join(struct.pack(f"<{len(d[1])}{width}", *d[1]) for d in documents)
    payload += bytes(-len(payload) % 8)
    first = [0]
    for d in documents:
        first.append(first[-1] + len(d[1]))
    payload += struct.pack(f"<{len(first)}Q", *first) + bytes(d[0] for d in documents)
    table = b"".join(words(xxh(payload[i:i + (1 << 20)])) for i in range(0, len(payload), 1 << 20))
    text = "".join("%s\t%d\t%d\t%s\n" % (s["name"], sum(d[0] == i for d in documents), sum(len(d[1]) for d in documents if d[0] == i),
                                         s["path"]) for i, s in enumerate(sources))
    text = (text + "settings\t%s\n" % settings["line"]).encode()
    trailer = words(xxh(header + table)) + words(xxh(text)) + struct.pack("<Q", len(text)) + bytes(16) + b"FP4DEND\n"
    return header + payload + table + text + trailer


def prepare(settings):
    """The bytes of the training stream and of the validation stream."""
    documents = documents_of(settings)
    fraction = settings.get("validation_fraction", 0.2)
    sides = [[d for d in documents if held_out(d[2], fraction) == side] for side in (False, True)]
    return tuple(stream(mix(side, settings, validation), settings) for validation, side in enumerate(sides))
