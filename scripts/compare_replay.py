#!/usr/bin/env python3
"""Compares updates that two records of one run both hold, to the last bit.

  scripts/compare_replay.py BEFORE.jsonl AFTER.jsonl

BEFORE was copied when the run died, AFTER is the file that its continuation
wrote (docs/formats.md).  Updates after the last checkpoint of BEFORE were done
twice: loss, gradient norm and batch hash must be the same text.  Exit status 1
where they are not, or where nothing was done twice.
"""
import json
import sys


def updates(path):
    found, saved = {}, 0
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break  # torn by the kill
            record = json.loads(line)
            if record["kind"] == "update":
                found[record["update"]] = (record["loss"], record["grad_norm"], record["batch_hash"])
            elif record["kind"] == "checkpoint":
                saved = record["update"]
    return found, saved


def main():
    before, saved = updates(sys.argv[1])
    after, _ = updates(sys.argv[2])
    twice = sorted(u for u in before if u > saved and u in after)
    different = [u for u in twice if before[u] != after[u]]
    if not twice:
        sys.exit("compare_replay: no update was done twice")
    if different:
        u = different[0]
        sys.exit("compare_replay: update %d differs: %s, then %s" % (u, before[u], after[u]))
    print("updates %d-%d were done twice, before and after the kill: loss, gradient norm and batch are the same to the bit"
          % (twice[0], twice[-1]))


if __name__ == "__main__":
    main()
