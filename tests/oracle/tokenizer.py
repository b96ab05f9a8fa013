#!/usr/bin/env python3
"""Token ids of tiktoken and of Hugging Face tokenizers for tests/golden/vocabulary.tiktoken.

  tests/oracle/tokenizer.py vocabulary.tiktoken IDS.txt TOKENIZER.json

The vocabulary is one that `fp4d tokenize --train` learnt from this repository's documentation.  IDS.txt has a line a
text: the kind (t: tiktoken; m: tiktoken inside Meta's splitting of long texts; s: tiktoken with specials; h: tokenizers
with TOKENIZER.json; g: tokenizers with it and specials), the text as a recipe, and its ids.  TOKENIZER.json has the
vocabulary in another order with merges, so that ids are not ranks, as GPT-2's have (ignore_merges false).

A recipe is hexadecimal UTF-8, or PIECE*COUNT joined by '+' for long texts.  Ids of long texts are given as count and hash.
"""
import base64
import json
import random
import sys
import unicodedata

import tiktoken
import tokenizers

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
           r"\s+(?!\S)|\s+")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u180e\u2000\u2005\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>"]


def texts():
    yield from (
        "", " ", "a", "hello world", "Hello, World!", "It's we'll I'VE you'Re he'D they'LL 'S'T x'\u017f x'\u017ft '\u212a",
        "'s's's 's", "don\u2019t", "1", "12", "123", "1234567890", "1,234.56", "\u0663\u0664\u0665\u0666", "x\u00b2\u00bd\u2167y", "a1b22c333",
        "a\nb", "a\r\nb\r\n\r\nc", "\r\r\n\n", "a \n b", "a  \n\n  b", "  lead", "trail  ", "a   b    c", "\t\tif (x)\n\t\t\treturn;\n",
        "!!!\n\n", "...\r\nnext", "foo();\n}\n", "caf\u00e9 cafe\u0301 e\u0301\u0302\u0303", "\u0301x", " \u0301x",
        "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u041f\u0440\u0438\u0432\u0435\u0442", "\u0645\u0631\u062d\u0628\u0627", "\ud55c\uad6d\uc5b4",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea", "a\u200bb\u200dc\ufeffd", "\ufffd\ufffe\uffff\U0010ffff",
        "\x00", "a\x00b\x00\x00", "\x7f\x01\x02", "<|begin_of_text|>hi<|end_of_text|>", "<|end_of_text", "<<|end_of_text|>>", "<|end_of_text|><|end_of_text|> x",
        "https://example.org/a?b=c&d=%20#e_f", "snake_case camelCase ALLCAPS", "x" * 70, "ab" * 200, "=" * 64 + "\n", "-" * 200, " " * 90 + "x", "\n" * 90)
    for c in SPACES:
        yield c
        yield f"a{c}b{c}{c}c {c} d{c}"
        yield f"{c}\n{c}"
    yield SPACES
    yield "".join(a + b for a in SPACES for b in SPACES)
    rng = random.Random(5)
    assigned = [c for c in map(chr, list(range(0x3000)) + list(range(0x3000, 0x110000, 53)))
                if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    for _ in range(60):
        yield "".join(rng.choice(assigned) for _ in range(rng.randrange(1, 60)))
    for _ in range(60):
        yield "".join(rng.choice(["the", "ing", " of", "  ", "\n", "'s", "1", "23", "\u00e9", "e", "x", "-", "\t", "Q", "\r\n"]) for _ in range(rng.randrange(1, 80)))


def long_texts():
    yield [("a", 30000)]
    yield [(" ", 30000)]
    yield [("ab ", 9000), ("\x1c", 26000), ("q", 25000), ("r", 1), ("\n", 60000)]
    yield [("na\u00efve ", 70000)]
    yield [("x", 100000), (" y", 200000), ("z", 12345)]


def pieces_of_meta(text):
    """llama_models' tokenizer.py: what one call of tiktoken gets."""
    for at in range(0, len(text), 400000):
        call = text[at:at + 400000]
        run, space, start = 0, call[0].isspace(), 0
        for i, c in enumerate(call):
            if c.isspace() != space:
                run, space = 1, not space
            else:
                run += 1
                if run > 25000:
                    yield call[start:i]
                    start, run = i, 1
        yield call[start:]


def alphabet():
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in printed]
    return {b: chr(b) for b in printed} | {b: chr(256 + i) for i, b in enumerate(other)}


def tokenizer_json(ranks):
    """Ids are the ranks reversed; each token's merge is the pair that is left when its own merge is not yet allowed."""
    letters = alphabet()

    def parts(token, below):
        seq = [bytes([b]) for b in token]
        while True:
            best = min(((ranks[x + y], i) for i, (x, y) in enumerate(zip(seq, seq[1:])) if ranks.get(x + y, below) < below), default=None)
            if best is None:
                return seq
            i = best[1]
            seq[i:i + 2] = [seq[i] + seq[i + 1]]

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            pair = parts(token, rank)
            assert len(pair) == 2, (token, pair)
            merges.append(["".join(letters[b] for b in part) for part in pair])
    vocab = {"".join(letters[b] for b in token): len(ranks) - 1 - rank for token, rank in ranks.items()}
    added = [{"id": len(ranks) + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": i < 2}
             for i, s in enumerate(SPECIALS + ["\u2014\u2014"])]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab,
             "merges": merges}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": model}


def summary(ids):
    h = 0
    for i in ids:
        h = (h * 1000003 + i + 1) & 0xffffffffffffffff
    return f"#{len(ids)} {h:016x}"


def main():
    vocabulary, ids_path, json_path = sys.argv[1:]
    ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in open(vocabulary, "rb"))}
    encoder = tiktoken.Encoding("golden", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={s: len(ranks) + i for i, s in enumerate(SPECIALS)})
    with open(json_path, "w", encoding="utf-8") as out:
        json.dump(tokenizer_json(ranks), out, ensure_ascii=False, indent=None, separators=(",", ":"))
        out.write("\n")
    hugging = tokenizers.Tokenizer.from_file(json_path)
    plain = tokenizers.Tokenizer.from_file(json_path)
    plain.encode_special_tokens = True
    with open(ids_path, "w") as out:
        def put(kind, recipe, ids):
            out.write(f"{kind} {recipe or '-'} {' '.join(map(str, ids)) if isinstance(ids, list) else ids}\n")

        for text in texts():
            recipe = text.encode().hex()
            put("t", recipe, encoder.encode(text, disallowed_special=()))
            put("h", recipe, plain.encode(text, add_special_tokens=False).ids)
            if "<|" in text:
                put("s", recipe, encoder.encode(text, allowed_special="all"))
                put("g", recipe, hugging.encode(text, add_special_tokens=False).ids)
        for parts in long_texts():
            text = "".join(piece * count for piece, count in parts)
            recipe = "+".join(f"{piece.encode().hex()}*{count}" for piece, count in parts)
            put("m", recipe, summary([i for p in pieces_of_meta(text) for i in encoder.encode(p, disallowed_special=())]))
            put("h", recipe, summary(plain.encode(text, add_special_tokens=False).ids))


main()
