#!/usr/bin/env python3
"""Golden lines for the reader of JSON texts: what Python's json says.

    python3 tests/oracle/json_text.py [SEED [COUNT]] > tests/golden/json_text.txt

Lines: the bytes of a line in hexadecimal, then the text under "text" in hexadecimal ("-" when it is
empty) and its number of lone surrogates; or "refused".  Half the cases are damaged at random places.
"""
import json
import random
import sys

KEY = "text"




def random_text(r):
    kinds = [lambda: chr(r.randrange(32, 127)), lambda: r.choice('"\\/\b\f\n\r\t\x00\x1f'), lambda: chr(r.randrange(0xA0, 0x800)),
             lambda: chr(r.choice([r.randrange(0x800, 0xD800), r.randrange(0xE000, 0x10000)])), lambda: chr(r.randrange(0x10000, 0x110000)),
             lambda: chr(r.randrange(0xD800, 0xE000))]
    weights = [10, 2, 2, 2, 1, r.choice([0, 0, 1])]
    return "".join(r.choices(kinds, weights)[0]() for _ in range(r.choice([0, 1, 3, 9, 40])))


def encode_text(r, text):
    out = ""
    for c in text:
        n = ord(c)
        if 0xD800 <= n < 0xE000 or r.random() < 0.1 or (n < 32 or c in '"\\') and c not in '"\\\b\f\n\r\t':
            units = [n] if n < 0x10000 else [0xD800 + (n - 0x10000 >> 10), 0xDC00 + (n - 0x10000 & 0x3FF)]
            out += "".join("\\u" + "".join(r.choice([d.lower(), d.upper()]) for d in f"{u:04x}") for u in units)
        elif c in '"\\\b\f\n\r\t':
            out += {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}[c]
        elif c == "/":
            out += r.choice(["/", "\\/"])
        else:
            out += c
    return '"' + out + '"'


def blank(r):
    return r.choice(["", "", "", " ", "\t", " \r "])


def random_value(r, depth):
    kind = r.randrange(9 if depth < 4 else 7)
    if kind == 0:
        return r.choice(["true", "false", "null", "NaN", "Infinity", "-Infinity"])
    if kind < 4:
        return encode_text(r, random_text(r))
    if kind < 7:
        return r.choice(["0", "-0", "12", "-7.25", "1e5", "1E-3", "0.5e+7", "123456789012345678901234567890"])
    items = range(r.choice([0, 1, 3]))
    if kind == 7:
        return "[" + blank(r) + ",".join(blank(r) + random_value(r, depth + 1) + blank(r) for _ in items) + "]"
    return "{" + blank(r) + ",".join(member(r, random_text(r), depth + 1) for _ in items) + "}"


def member(r, key, depth):
    return blank(r) + encode_text(r, key) + blank(r) + ":" + blank(r) + random_value(r, depth) + blank(r)


def random_line(r):
    keys = [r.choice([KEY, KEY, "id", "text2", "tex", random_text(r)]) for _ in range(r.choice([0, 1, 2, 4]))]
    if r.random() < 0.8:
        keys.insert(r.randrange(len(keys) + 1), KEY)
    members = [blank(r) + encode_text(r, k) + blank(r) + ":" + blank(r) +
               (encode_text(r, random_text(r)) if k == KEY and r.random() < 0.9 else random_value(r, 0)) + blank(r) for k in keys]
    line = blank(r) + "{" + (",".join(members) or blank(r)) + "}" + blank(r)
    if r.random() < 0.5:
        for _ in range(r.choice([1, 1, 2])):
            at = r.randrange(len(line) + 1)
            what = r.randrange(3)
            if what == 0:
                line = line[:at] + line[at + 1:]
            elif what == 1:
                line = line[:at] + r.choice('{}[],:"\\u0123eE+-.\x01\x1f tfn') + line[at:]
            else:
                line = line[:at]
    return line.replace("\n", " ")


def expected(line):
    try:
        value = json.loads(line)
    except ValueError:
        return "refused"
    if not isinstance(value, dict) or not isinstance(value.get(KEY), str):
        return "refused"
    text = value[KEY]
    lone = sum(0xD800 <= ord(c) < 0xE000 for c in text)
    text = "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    return (text.encode().hex() or "-") + f" {lone}"


def main():
    r = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 400):
        line = random_line(r)
        try:
            data = line.encode()
        except UnicodeEncodeError:  # a bare half of a pair cannot stand in a file of UTF-8
            continue
        if b"\xef\xbb\xbf" == data[:3]:
            continue
        print(data.hex() or "-", expected(line))


main()
