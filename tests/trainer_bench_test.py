#!/usr/bin/env python3
"""bench under mpirun: collectives and checkpoints of two ranks; what runs in one process says so.

Prints "ok NAME" or "not ok NAME: why" for each test; exit status 0 iff all are ok.
"""
import json
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fp4d import COMMUNICATION, DONE, ENVIRONMENT, LIMIT, PROGRAM, ROOT, SYSTEM, USAGE, check, main


def bench(*arguments, np=2, folder=".", before=()):
    done = subprocess.run(["mpirun", "-np", str(np), "--oversubscribe", "--bind-to", "none", *before, PROGRAM, "bench", *arguments],
                          env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stdout, done.stderr


def test_collectives():
    code, out, err = bench("collectives", "--megabytes", "1", "--repeat", "3", "--json")
    check(code == DONE, f"exit code {code}", err)
    rows = [json.loads(line) for line in out.splitlines()]
    check([r["bytes"] for r in rows] == [4096, 65536, 1048576], "sizes", out)
    for r in rows:
        check(r["world"] == 2 and r["copy_bytes_per_second"] > 0, "row", str(r))
        check(abs(r["bytes_per_second"] * r["seconds"] / r["bytes"] - 1) < 1e-9, "rate", str(r))
        check(abs(r["bus_bytes_per_second"] / r["bytes_per_second"] - 1) < 1e-9, "2 (n-1)/n of two ranks is 1", str(r))


def test_collectives_that_fail():
    """What no exchange can follow is refused once; a rank that stands still in their midst is named, and the job ends."""
    code, out, err = bench("collectives", np=1)
    check(code == USAGE and err.count("a world of one has nothing to sum") == 1, "one rank", err)
    code, out, err = bench("collectives", "--megabytes", str(1 << 20))
    check(code == SYSTEM and err.count("error:") == 1 and re.search(r"two times 1099\.512 GB on each of this host's 2 ranks are more than its memory", err),
          "more than there is", err)
    config = os.path.join(ROOT, "configs", "ablation", "tiny.yaml")
    stops = 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then (sleep 3; kill -STOP $$) & fi; exec "$@"'
    code, out, err = bench("collectives", config, "--set", "limits.heartbeat_s=2", "--repeat", "1000", before=("sh", "-c", stops, "sh"))
    check(code == COMMUNICATION and err.count("error:") == 1 and
          re.search(r"rank 1 has been silent for \d+\.\d s (waiting )?in '(reduce-scatter, all-gather|copy in memory)'; ending the job", err), "rank and operation", err)


def test_checkpoint():
    with tempfile.TemporaryDirectory(prefix="fp4d-bench-") as folder:
        code, out, err = bench("checkpoint", "--megabytes", "4", "--repeat", "2", folder=folder)
        check(code == DONE, f"exit code {code}", err)
        check("in 2 files under ." in out and len(out.splitlines()) == 9, "rows of rank 0 alone", out)
        check(os.listdir(folder) == [], "what was written is removed", str(os.listdir(folder)))


def test_whole_state():
    """A configuration's state, cut for ranks, written and read back by one process; what does not fit is refused by name."""
    with tempfile.TemporaryDirectory(prefix="fp4d-bench-") as folder:
        asked = ("checkpoint", os.path.join(ROOT, "configs", "ablation", "tiny.yaml"), "--folder", "here", "--ranks", "3")
        code, out, err = bench(*asked, "--json", np=1, folder=folder)
        check(code == DONE, f"exit code {code}", err)
        rows = [json.loads(line) for line in out.splitlines()]
        check([r["compression"] for r in rows] == ["zstd"] * 4 + ["store"] * 4, "rows", out)
        saves = [r for r in rows if r["operation"].startswith("save")]
        check(all(r["bytes"] == saves[0]["bytes"] and r["ranks"] == r["files"] == 3 for r in saves), "sizes", out)
        check(saves[0]["file_bytes"] < saves[1]["file_bytes"] and saves[1]["file_bytes"] > saves[1]["bytes"], "zstd is smaller", out)
        code, out, err = bench(*asked, "--files", "2", "--set", "train.master=false", "--json", np=1, folder=folder)
        part = [json.loads(line) for line in out.splitlines()]
        check(code == DONE and 0.4 < part[1]["bytes"] / saves[0]["bytes"] < 2 / 3 and part[1]["files"] == 2, "two of three files, BF16 parameters", out + err)
        check(os.listdir(os.path.join(folder, "here")) == [], "what was written is removed", str(os.listdir(folder)))
        for more, why in ((("--files", "4"), "--files 4 of --ranks 3"), (("--megabytes", "3"), "--megabytes with --ranks")):
            code, out, err = bench(*asked, *more, np=1, folder=folder)
            check(code == USAGE and why in err, why, err)
        code, out, err = bench(*asked, folder=folder)
        check(code == USAGE and "--ranks runs in one process, 2 were started" in err, "two ranks", err)
        code, out, err = bench("checkpoint", os.path.join(ROOT, "configs", "llama3-8b", "bf16.yaml"), "--folder", "here", "--ranks", "4", "--set", "model.n_layers=450", "--set", "model.ffn_size=1048576", np=1,
                               folder=folder)
        check(code == SYSTEM and "(a sixteenth of it) stay free" in err and "would fit" in err, "70 TB do not fit", err)
        code, out, err = bench("checkpoint", "--ranks", "3", np=1, folder=folder)
        check(code == USAGE and "CONFIG is missing" in err, "no configuration", err)


def test_one_process():
    code, out, err = bench("gemm", "--shape", "64,64,64")
    check(code == USAGE, f"exit code {code}", err)
    check(err.count("bench gemm runs in one process, 2 were started") == 1, "said once", err)


if __name__ == "__main__":
    sys.exit(main(globals()))
