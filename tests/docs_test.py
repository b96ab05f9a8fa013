#!/usr/bin/env python3
"""The manual against the program: commands, flags, keys, files and links that it names are there.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

from fp4d import BUILD, LIMIT, PROGRAM, ROOT, Skipped, check, main

ROOMS = "base|kernels|comm|data|model|checkpoints|trainer|configs|scripts|tests|docs"


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def pages():
    return ["README.md"] + sorted(os.path.relpath(p, ROOT) for p in glob.glob(os.path.join(ROOT, "docs", "*.md")))


def code(text):
    """What stands in backticks or in an indented or fenced block, comments left out."""
    fenced = re.split(r"^```.*$", text, flags=re.M)
    for i, part in enumerate(fenced):
        if i % 2:
            yield from part.splitlines()
            continue
        for line in part.splitlines():
            if line.startswith("    "):
                yield re.sub(r"  +#.*", "", line).strip()
            else:
                yield from (span.replace("\\|", "|") for span in re.findall(r"`([^`]+)`", line))


def shown(*arguments):
    return subprocess.run([PROGRAM, "help", *arguments], capture_output=True, text=True, timeout=LIMIT, check=True).stdout


def keys():
    """Every key of a configuration, "section.key"."""
    found, section = set(), ""
    for line in shown("config").splitlines():
        title, key = re.fullmatch(r"([a-z.\[\]]+): .*", line), re.fullmatch(r"  ([a-z_.]+)  .*", line)
        if line == "Top level":
            section = ""
        elif title:
            section = title.group(1) + "."
        elif key:
            found.add(section + key.group(1))
    check(len(found) > 70 and "optimizer.lr" in found and "fault" in found, "keys of `fp4d help config`", str(sorted(found)))
    return found


def test_commands():
    """`fp4d COMMAND --flag` of every page."""
    commands = re.findall(r"^  fp4d ([a-z]+) ", shown(), re.M)
    flags = {c: set(re.findall(r"^  (--[a-z-]+)", shown(c), re.M)) for c in commands}
    seen = 0
    for page in pages() + ["configs/ablation/routes-tiny.yaml", "configs/ablation/attention-tiny.yaml", "configs/ablation/tiny.yaml"]:
        for line in code(read(page)) if page.endswith(".md") else re.findall(r"fp4d [^`\n]*", read(page)):
            for command, rest in re.findall(r"(?:^|[/ ])fp4d ([a-z]+)(?= |$)([^;|&]*)", line):
                seen += 1
                check(command in commands, f"{page}: there is no command {command}", line)
                for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", rest.replace("[", " ")):
                    check(flag in flags[command], f"{page}: {command} has no flag {flag}", line)
    check(seen > 40, f"only {seen} commands were found")


def test_keys():
    """`section.key` and --set section.key= of every page; sections of the configuration alone."""
    known = keys()
    sections = {k.split(".")[0] for k in known if "." in k}
    seen = 0
    for page in pages():
        for line in code(read(page)):
            named = re.findall(r"--set ([a-z_.]+)=", line)
            if re.fullmatch(r"[a-z_.]+(: [\w.-]+)?(=\S+)?", line) and line.split(".")[0] in sections and "." in line:
                named.append(re.split("[:=]", line)[0])
            for key in named:
                if re.search(r"\.(c|h|md|py|sh|yaml|json|jsonl|h5|tokens|safetensors)$", key) or key in ("key", "section.key"):
                    continue
                seen += 1
                check(key in known or any(k.startswith(key + ".") for k in known), f"{page}: there is no key {key}", line)
    check(seen > 20, f"only {seen} keys were found")


def test_examples():
    """Every configuration that a page shows, and the ablation of `fp4d help ablate`, is one: on top of Llama 8B's where it gives
    no base, and with the ranks of its launcher."""
    seen = 0
    with tempfile.TemporaryDirectory() as folder:
        for page in pages():
            text = read(page)
            blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
            blocks += [textwrap.dedent(b) for b in re.findall(r"(?<=\n\n)((?:    (?:data|route):\n)(?:    .*\n)+)", text)]
            for block in blocks:
                seen += 1
                path = os.path.join(folder, f"example-{seen}.yaml")
                base = "" if block.startswith("include:") else "include: configs/llama3-8b/base.yaml\n"
                with open(path, "w", encoding="utf-8") as f:
                    f.write((base + block).replace("include: ", f"include: {ROOT}/"))
                said = checked(path)
                check(said.startswith("ok       config"), f"{page}: an example is no configuration", block + said)
        check(seen > 4, f"only {seen} examples were found")

        example = dict(re.findall(r"^  (base|launch|set): +(.*?)(?: +#.*)?$", shown("ablate"), re.M))
        sets = re.findall(r"(\w+): \{([^{}]*)\}", example["set"])
        words = [f"{section}.{k.strip()}={v.strip()}" for section, keys in sets for k, v in (pair.split(":") for pair in keys.split(","))]
        check(words, "fp4d help ablate: set", str(example))
        words.append("run.ranks=" + re.search(r"-np (\d+)", example["launch"])[1])
        said = checked(os.path.join(ROOT, "configs", "ablation", example["base"]), *words)
        check(said.startswith("ok       config"), "fp4d help ablate: its example", said)


def checked(path, *sets):
    words = [word for s in sets for word in ("--set", s)]
    return subprocess.run([PROGRAM, "check", path, *words], capture_output=True, text=True, timeout=LIMIT, check=False, cwd=ROOT).stdout


def test_no_libm():
    """docs/numerics.md: no libm in anything that trains.  Its functions are not correctly rounded, so their bits differ from
    machine to machine; `generate` may use them."""
    inexact = re.compile(r" U ((?:cos|sin|tan|sincos|exp|exp2|exp10|expm1|log|log2|log10|log1p|pow|cbrt|tanh|hypot|erf|atan2?)f?)$", re.M)
    objects = [p for room in ("base", "kernels", "kernels/cpu", "comm", "data", "model", "checkpoints", "trainer")
               for p in glob.glob(os.path.join(BUILD, room, "*.o"))]
    check(len(objects) > 100, f"objects in {BUILD}")
    if not shutil.which("nm"):
        raise Skipped("no nm")
    for path in objects:
        if os.path.basename(path) != "sample.o":
            used = inexact.findall(subprocess.run(["nm", "-u", path], capture_output=True, text=True, check=True).stdout)
            check(not used, f"{os.path.relpath(path, BUILD)} calls {', '.join(used)}")


def test_files():
    """Files of this tree that a page names, and links."""
    seen = 0
    for page in pages():
        text = read(page)
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            seen += 1
            check(re.match("https?:", link) or os.path.exists(os.path.join(ROOT, os.path.dirname(page), link)), f"{page}: the link {link} leads nowhere")
        for line in code(text):
            for path in re.findall(rf"(?<![\w/.-])(?:{ROOMS})/[\w./-]*\w/?", line):
                if re.search(r"[A-Z]{3}", path) and "README" not in path:
                    continue  # NAME stands for a name
                seen += 1
                check(os.path.exists(os.path.join(ROOT, path)), f"{page}: there is no {path}", line)
    check(seen > 40, f"only {seen} files and links were found")


if __name__ == "__main__":
    sys.exit(main(globals()))
