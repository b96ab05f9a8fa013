#!/usr/bin/env python3
"""kill -9 at random moments: every next start goes on from a whole checkpoint, and in the end nothing
tells that anything happened.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"; exit status 0
iff all are ok.  Arguments: names of tests to run (default all).
FP4D_TEST_KILLS sets how often the first test kills (default 20).
"""
import os
import random
import re
import signal
import sys
import time

from fp4d import DONE, Place, check, main, same

# A save takes about as long as an update: 0.6 million parameters, 7 MB.  With a save after each of
# them, and training going on meanwhile, one is under way nearly always.
SETTINGS = {"model.hidden_size": 192, "model.ffn_size": 512, "model.n_heads": 6, "model.n_kv_heads": 2,
            "checkpoint.every": 1, "checkpoint.keep": 2, "data.validation": "",
            "optimizer.schedule": "constant", "optimizer.min_lr": 0}

place = Place()


def await_save(name):
    """A second at most: another look at the folder costs less than a save, whatever the machine does with updates."""
    until = time.monotonic() + 1
    while not (os.path.isdir(place.at(name, "checkpoints")) and place.temporaries(name)) and time.monotonic() < until:
        pass


def killed_often(np, kills, seed):
    dice = random.Random(seed)
    name = f"killed-{np}"
    kill = saved = inside = 0  # newest update that a process called saved; kills that left a temporary
    enough = kills // 5
    while kill < kills or (inside < enough and kill < 5 * kills):  # more on a machine where our look comes late
        job = place.start_train(name, {**SETTINGS, "train.updates": 1000000}, np)
        job.wait_for(r"(?s)(.* saved ){%d}" % dice.randrange(1, 4) if kill % 4 else r"update +\d+/")
        time.sleep(dice.uniform(0, 0.1))
        if kill % 2:
            await_save(name)
        ranks = job.ranks()
        check(len(ranks) == max(np, 1), f"{len(ranks)} ranks are there", job.text())
        os.kill(dice.choice(ranks), signal.SIGKILL)
        out = job.end()
        check(out.code == (137 if np else -9), f"exit code {out.code}", out.text)
        resumed = re.search(r"resumed from \S+ at update (\d+)\n", out.text)
        check("passed over" not in out.text, "what a killed process left is no damaged checkpoint", out.text)
        check(saved == 0 or resumed and int(resumed.group(1)) >= saved, f"resumed from {saved} or later", out.text)
        saved = max([saved] + [int(u) for u in re.findall(r"update +(\d+) +saved", out.text)])
        inside += os.path.isdir(place.at(name, "checkpoints")) and bool(place.temporaries(name))
        kill += 1
    check(inside >= enough, f"only {inside} of {kill} kills met a save")

    newest = place.steps(name)[-1]
    check(newest >= saved, f"the newest checkpoint {newest} and the last one called saved {saved}")
    last = {**SETTINGS, "train.updates": newest + 2}
    place.train(name, last, np).expect(DONE, rf"at update {newest}\n")
    check(place.steps(name) == [newest + 1, newest + 2] and place.temporaries(name) == [], "nothing is left over",
          str(os.listdir(place.at(name, "checkpoints"))))
    check(place.column(name, "update") == list(range(1, newest + 3)), "each update is on record once")
    place.run(f"calm-{np}", {**last, "checkpoint.every": 0}, np)
    same(place.updates(f"calm-{np}"), place.updates(name), "after all the kills")
    same(place.tensors(f"calm-{np}", newest + 2), place.tensors(name, newest + 2), "after all the kills: tensors")
    print(f"# {kill} kills, {inside} of them inside a save, {newest} updates")


def test_killed_often(): killed_often(0, int(os.environ.get("FP4D_TEST_KILLS", "20")), 1)
def test_killed_often_2(): killed_often(2, 12, 2)


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
