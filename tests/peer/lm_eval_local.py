#!/usr/bin/env python3
"""scripts/run_lm_eval.py on a small model and tasks made here: no network, no data set.

    BUILD=build PYTHON=python3 tests/peer/lm_eval_local.py

PYTHON has lm_eval, transformers and torch.  A byte model is trained for some updates on this
repository's text, exported in FP32 with the tokenizer of scripts/byte_tokenizer.py, and evaluated on
a multiple-choice task (which word follows?) and on the perplexity of whole texts.  Held: BOS stands once
in every request, `fp4d score` gives lm-eval's sums to 1e-4 and its `greedy`, and accuracy, recounted
from fp4d's own answers, is lm-eval's.
"""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from fp4d import DONE, PROGRAM, ROOT, Place, check, write_config

PYTHON = os.environ.get("PYTHON", "python3")

CHOICE = """task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {validation: QUESTIONS}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WHOLE = """task: local_whole
dataset_path: json
dataset_kwargs: {data_files: {validation: QUESTIONS}}
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""


def questions(path):
    """A line's beginning and its next word among words from elsewhere; one text begins with BOS' name."""
    with open(os.path.join(ROOT, "docs", "operations.md")) as f:
        lines = [line.split() for line in f if 8 < len(line.split()) < 20 and line[0].isalpha()][:40]
    with open(path, "w") as f:
        for i, line in enumerate(lines):
            choices = [" " + line[6], " " + lines[i - 1][3], " " + lines[i - 3][5] + " and", " zzz"]
            text = " ".join(line[:6])
            f.write(json.dumps({"text": ("<|begin_of_text|>" if i == 3 else "") + text, "choices": choices[i % 4:] + choices[:i % 4], "answer": -i % 4}) + "\n")
    return len(lines)


def main():
    place = Place(files=24, each=2048)
    settings = {"train.updates": 60, "train.seq_len": 128, "optimizer.lr": 1e-2, "train.global_batch": 8}
    write_config(place.at("tiny.yaml"), {**place.settings, **settings})
    place.prepare("train.tokens", "corpus")
    place.run("run")
    write_config(place.at("fp32.yaml"), {**place.settings, **settings, "route": "fp32", "train.param_dtype": "fp32"})
    subprocess.run([PYTHON, os.path.join(ROOT, "scripts", "byte_tokenizer.py"), place.at("tok")], check=True)
    place.command("export", "run", "out", "--dtype", "fp32", "--tokenizer", "tok").expect(DONE)
    place.command("import", "out", "back").expect(DONE)
    os.makedirs(place.at("tasks"))
    n = questions(place.at("questions.jsonl"))
    for name, text in (("choice", CHOICE), ("whole", WHOLE)):
        with open(place.at("tasks", name + ".yaml"), "w") as f:
            f.write(text.replace("QUESTIONS", place.at("questions.jsonl")))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": place.at("cache"), "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([PYTHON, os.path.join(ROOT, "scripts", "run_lm_eval.py"), "out", "local_choice", "local_whole", "--include-path", "tasks", "--json", "found.json",
                    "--beside", PROGRAM, "back", "fp32.yaml"], check=True, cwd=place.path, env=environment)
    with open(place.at("found.json")) as f:
        found = json.load(f)
    accuracy, seen = found["results"]["local_choice"]["acc,none"], found["beside"]
    check(found["bos"] == 256 and seen["requests"] == 5 * n, "four choices and a whole text for each question", str(seen))
    check(seen["largest_difference"] < 1e-4 and seen["greedy_differs"] == 0, "fp4d score and lm-eval", str(seen))
    check(accuracy > 0.3, "it has learnt something", str(accuracy))

    requests, wanted = [], []
    with open(place.at("questions.jsonl")) as f:
        for q in map(json.loads, f):
            wanted.append(q["answer"])
            text = q["text"].removeprefix("<|begin_of_text|>")
            requests += [{"context": [256, *text.encode()], "continuation": list(c.encode())} for c in q["choices"]]
    with open(place.at("own.jsonl"), "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in requests)
    place.command("score", "back", "fp32.yaml", "--in", "own.jsonl", "--out", "own").expect(DONE)
    with open(place.at("own")) as f:
        sums = [json.loads(line)["logprob"] for line in f]
    right = sum(max(range(4), key=lambda c: sums[4 * i + c]) == answer for i, answer in enumerate(wanted))
    check(abs(right / n - accuracy) < 1e-9, "accuracy from fp4d's own answers", f"{right}/{n} {accuracy}")
    print(f"ok: accuracy {right}/{n} both ways; {seen}")
    place.close()


main()
