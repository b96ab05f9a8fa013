#!/usr/bin/env python3
"""The tokenizer `bytes` (256 byte values, begin and end of text) as files of Hugging Face.

    scripts/byte_tokenizer.py FOLDER
    fp4d export CKPT DIR --tokenizer FOLDER

Byte-level BPE without merges: a byte's token is the character that stands for it there, and its id the
byte.  Begin and end of text are the special tokens 256 and 257; encoding adds neither.
"""
import json
import os
import sys


def characters():
    """The character of each byte: itself where it is printable in Latin-1, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(0x100 + others.index(b)) for b in range(256)]


def special(number, text):
    return {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special(256, bos), special(257, eos)], "normalizer": None,
                 "pre_tokenizer": level, "post_processor": None, "decoder": level,
                 "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                           "byte_fallback": False, "ignore_merges": False, "vocab": {c: b for b, c in enumerate(characters())}, "merges": []}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "clean_up_tokenization_spaces": False}
    os.makedirs(sys.argv[1], exist_ok=True)
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        with open(os.path.join(sys.argv[1], name), "w", encoding="utf-8") as f:
            json.dump(content, f, ensure_ascii=False, indent=1)
            f.write("\n")


main()
