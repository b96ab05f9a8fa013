#!/usr/bin/env python3
"""lm-eval on a model that `fp4d export` made, with BOS exactly once.

    scripts/run_lm_eval.py DIR TASK... [--include-path FOLDER] [--limit N] [--shots N] [--device cuda] [--json FILE]
                       [--no-bos] [--beside PROGRAM CKPT CONFIG]

Needs lm_eval, transformers and torch.  DIR holds the tokenizer's files (`fp4d export --tokenizer`).

lm-eval and tokenizers each may put BOS before a text, or neither, or both: a tokenizer's template, a
text that begins with its name, and for whole documents the prefix that lm-eval itself gives.  Here
tokenizers add nothing and this program puts the id that config.json calls bos_token_id before every
context, once; a request that still has another number of them ends the run.  --no-bos: none, for a
model that was trained without.

--beside: the same ids go through `fp4d score CKPT CONFIG`; the largest difference of a
log-probability and how often `greedy` differs are printed, and with --json written.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager


class Exported(HFLM):
    def __init__(self, folder, bos, **more):
        self.bos, self.asked = bos, []
        super().__init__(pretrained=folder, add_bos_token=False, prefix_token_id=bos, **more)

    def once(self, context):
        """The ids of a context, which begins with BOS and has no other one."""
        if self.bos is None:
            return context
        if context[:1] != [self.bos]:
            context = [self.bos] + context
        if context.count(self.bos) != 1:
            sys.exit(f"a context has {context.count(self.bos)} tokens {self.bos}, BOS: {context[:8]}...")
        return context

    def _encode_pair(self, context, continuation):
        context, continuation = super()._encode_pair(context, continuation)
        return self.once(context), continuation

    def tok_batch_encode(self, strings, *rest, **more):
        """For tasks that generate: the special token's own name is read as the token."""
        name = self.tokenizer.decode([self.bos]) if self.bos is not None else ""
        return super().tok_batch_encode([s if name and s.startswith(name) else name + s for s in strings], *rest, **more)

    def _loglikelihood_tokens(self, requests, *rest, **more):
        answers = super()._loglikelihood_tokens(requests, *rest, **more)
        for (_, context, continuation), answer in zip(requests, answers, strict=True):
            # as lm-eval cuts what is too long: at its beginning
            ids = (list(context) + list(continuation))[-(self.max_length + 1):]
            self.asked.append((ids[:-len(continuation)], ids[-len(continuation):], answer))
        return answers


def beside(asked, program, checkpoint, config):
    """(requests, largest difference of a sum, of a sum over its tokens, greedy answers that differ)."""
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "requests.jsonl")
        with open(path, "w") as f:
            for context, continuation, _ in asked:
                f.write(json.dumps({"context": context, "continuation": continuation}) + "\n")
        text = subprocess.run([program, "score", checkpoint, config, "--in", path], check=True, stdout=subprocess.PIPE, text=True).stdout
    worst = each = differ = 0
    for line, (_, continuation, (logprob, greedy)) in zip(text.splitlines(), asked, strict=True):
        answer = json.loads(line)
        off = abs(answer["logprob"] - logprob)
        worst, each, differ = max(worst, off), max(each, off / len(continuation)), differ + (answer["greedy"] != greedy)
    return {"requests": len(asked), "largest_difference": worst, "largest_difference_a_token": each, "greedy_differs": differ}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", metavar="DIR")
    p.add_argument("tasks", metavar="TASK", nargs="+")
    p.add_argument("--include-path", help="a folder of task files of one's own")
    p.add_argument("--limit", type=float)
    p.add_argument("--shots", type=int)
    p.add_argument("--device", default="cpu")
    p.add_argument("--batch-size", default="8")
    p.add_argument("--json", help="write the results there")
    p.add_argument("--no-bos", action="store_true")
    p.add_argument("--beside", nargs=3, metavar=("PROGRAM", "CKPT", "CONFIG"))
    a = p.parse_args()
    with open(os.path.join(a.folder, "config.json")) as f:
        config = json.load(f)
    bos = None if a.no_bos else config.get("bos_token_id")
    if bos is None and not a.no_bos:
        sys.exit(f"{a.folder}/config.json names no bos_token_id: export with --bos ID, or give --no-bos")
    model = Exported(a.folder, bos, device=a.device, batch_size=a.batch_size, max_length=config.get("max_position_embeddings"), dtype="auto")
    results = lm_eval.simple_evaluate(model=model, tasks=a.tasks, num_fewshot=a.shots, limit=a.limit,
                                      task_manager=TaskManager(include_path=a.include_path))
    found = {"results": results["results"], "bos": bos, "model": a.folder}
    for task, values in results["results"].items():
        print(task, *(f"{k.split(',')[0]} {v:.4f}" for k, v in values.items() if isinstance(v, float)))
    if a.beside:
        found["beside"] = beside(model.asked, *a.beside)
        print("fp4d score:", *(f"{k} {v}" for k, v in found["beside"].items()))
    if a.json:
        with open(a.json, "w") as f:
            json.dump(found, f, indent=1, default=str)


if __name__ == "__main__":
    main()
