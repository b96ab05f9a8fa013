#!/usr/bin/python3
"""Checkpoints of tiny runs as h5py (an independent reader of HDF5) sees them.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"
for each test; exit status 0 iff all are ok.  Without h5py (Debian: python3-h5py): "ok ... # skipped".
"""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

SYSTEM_PYTHON = "/usr/bin/python3"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.abspath(os.environ.get("BUILD", os.path.join(ROOT, "build")))
os.environ["HDF5_PLUGIN_PATH"] = os.path.join(BUILD, "plugins")  # before the library starts
try:
    import h5py
    import numpy
except ImportError:
    if os.path.exists(SYSTEM_PYTHON) and not os.environ.get("FP4D_TEST_PYTHON"):
        os.environ["FP4D_TEST_PYTHON"] = "1"
        os.execv(SYSTEM_PYTHON, [SYSTEM_PYTHON, os.path.abspath(__file__)] + sys.argv[1:])
    print("ok checkpoints_h5py # skipped: no h5py")
    sys.exit(0)

PROGRAM = os.path.join(BUILD, "fp4d")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI", "PRTE_"))}
ENVIRONMENT.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

CONFIG = """
model: {preset: tiny}
route: bf16
data: {sources: [corpus], train: t.tokens, validation: v.tokens, validation_fraction: 0.4}
train: {updates: 4, seq_len: 32, global_batch: 2, local_batch: 1, param_dtype: bf16}
optimizer: {lr: 1e-2}
checkpoint: {keep: 1}
validation: {samples: 2}
run: {threads: 1}
"""

# Of the tiny preset: what docs/config.md and Meta's names give.
LAYER = {"attention_norm.weight": (64, 1), "attention.wq.weight": (64, 64), "attention.wk.weight": (32, 64),
         "attention.wv.weight": (32, 64), "attention.wo.weight": (64, 64), "ffn_norm.weight": (64, 1),
         "feed_forward.w1.weight": (160, 64), "feed_forward.w2.weight": (64, 160), "feed_forward.w3.weight": (160, 64)}
SHAPES = {"tok_embeddings.weight": (258, 64), "norm.weight": (64, 1), "output.weight": (258, 64),
          **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}}


class Wrong(Exception):
    pass


def check(condition, what):
    if not condition:
        raise Wrong(what)


def fp4d(*arguments, ranks=1):
    launch = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"] if ranks > 1 else []
    done = subprocess.run(launch + [PROGRAM, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=300)
    check(done.returncode == 0, f"fp4d {' '.join(arguments)}: {done.returncode}\n" + done.stdout.decode())


def read_step(folder, ranks):
    """Whole tensors by name, put together from the slices; and the manifest."""
    manifest = json.load(open(os.path.join(folder, "manifest.json")))
    names = sorted(os.listdir(folder))
    check(names == ["manifest.json"] + [f"rank-{r:05d}.h5" for r in range(ranks)], f"files {names}")
    tensors, rows = {}, {}

    def add(name, item):
        if not isinstance(item, h5py.Dataset):
            return
        a = item.attrs
        shape = (int(a["global_rows"]), int(a["cols"]))
        values = item[...].astype(numpy.float32)
        check(values.shape[1] == shape[1], f"{name}: shape {values.shape}")
        whole = tensors.setdefault(name, numpy.full(shape, numpy.nan, numpy.float32))
        check(whole.shape == shape, f"{name}: {shape} and {whole.shape}")
        first = int(a["first_row"])
        whole[first:first + len(values)] = values
        rows[name] = rows.get(name, 0) + len(values)
        check(item.dtype.itemsize >= item.id.get_type().get_size(), f"{name}: {item.dtype}")
        check(item.id.get_type().get_size() == (2 if int(a["dtype"]) == 2 else 4), f"{name}: element size")

    for r in range(ranks):
        with h5py.File(os.path.join(folder, f"rank-{r:05d}.h5"), "r") as f:
            f.visititems(add)
    for name, values in tensors.items():
        check(rows[name] == len(values), f"{name}: {rows[name]} rows of {len(values)}")
        check(numpy.isfinite(values).all(), f"{name}: not finite")
    return tensors, manifest


def run_and_read(master, ranks, compression="zstd"):
    name = f"m{int(master)}-np{ranks}-{compression}"
    sets = ["--set", f"checkpoint.compression={compression}", "--set", f"run.folder=runs/{name}", "--set", f"train.master={str(master).lower()}"]
    fp4d("train", "run.yaml", *sets, ranks=ranks)
    tensors, manifest = read_step(f"runs/{name}/checkpoints/step-00000004", ranks)
    kinds = ["adam_m", "adam_v", "master" if master else "param"]
    expected = {f"{kind}/{key}": shape for kind in kinds for key, shape in SHAPES.items()}
    check({n: t.shape for n, t in tensors.items()} == expected, f"tensors {sorted(tensors)}")
    check(manifest["update"] == 4, "update")
    meta = json.loads(manifest["meta"])
    check(meta["samples"] == 8 and meta["tokens"] == 256 and meta["world"] == ranks, f"meta {meta}")
    return tensors


def is_bf16(values):
    return not (values.view(numpy.uint32) & 0xFFFF).any()


def test_master():
    tensors = run_and_read(True, 1)
    weights = tensors["master/layers.0.attention.wq.weight"]
    check(weights.dtype == numpy.float32 and not is_bf16(weights), "an FP32 master has more than BF16's bits")
    check(0.001 < weights.std() < 1, f"standard deviation {weights.std()}")
    check(abs(tensors["master/norm.weight"] - 1).max() < 0.2, "gains begin at one")
    check((tensors["adam_v/output.weight"] >= 0).all(), "a negative second moment")
    check(tensors["adam_m/output.weight"].any(), "no first moment")


def test_bf16_parameters():
    tensors = run_and_read(False, 1)
    for name, values in tensors.items():
        if name.startswith("param/"):
            check(is_bf16(values), f"{name} is not BF16")
    weights = tensors["param/layers.1.feed_forward.w2.weight"]
    check(0.001 < weights.std() < 1, f"standard deviation {weights.std()}")
    check(abs(tensors["param/norm.weight"] - 1).max() < 0.2, "gains begin at one")
    master = read_step("runs/m1-np1-zstd/checkpoints/step-00000004", 1)[0]["master/layers.1.feed_forward.w2.weight"]
    # four updates of lr 1e-2 apart at most, by rounding alone
    check(abs(master - weights).max() < 0.05 and numpy.corrcoef(master.ravel(), weights.ravel())[0, 1] > 0.9,
          "BF16 weights are read as other numbers")


def test_stored():
    packed, _ = read_step("runs/m1-np1-zstd/checkpoints/step-00000004", 1)
    plain = run_and_read(True, 1, "store")
    check(all((plain[n] == packed[n]).all() for n in plain) and len(plain) == len(packed), "compression changes values")
    with h5py.File("runs/m1-np1-zstd/checkpoints/step-00000004/rank-00000.h5") as f, \
            h5py.File("runs/m1-np1-store/checkpoints/step-00000004/rank-00000.h5") as g:
        name = "master/tok_embeddings.weight"
        filters = [f[name].id.get_create_plist().get_filter(i)[0] for i in range(2)]
        check(filters == [2, 32015] and f[name].chunks == (258, 64), f"filters {filters}, chunks {f[name].chunks}")
        check(g[name].chunks is None, "stored is contiguous")
        check(f[name].id.get_storage_size() < g[name].id.get_storage_size(), "it shrinks")


def test_other_tools():
    """h5dump reads values through the plugin, and says what is missing without it."""
    if shutil.which("h5dump") is None:
        return
    path = "runs/m1-np1-zstd/checkpoints/step-00000004/rank-00000.h5"
    command = ["h5dump", "-d", "/master/norm.weight", path]
    done = subprocess.run(command, capture_output=True, text=True)
    check(done.returncode == 0 and "(0,0): 1" in done.stdout or "(0,0): 0.9" in done.stdout, done.stdout[-300:] + done.stderr[-300:])
    blind = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HDF5_PLUGIN_PATH": "/nonexistent"})
    check(blind.returncode != 0 and "(0,0)" not in blind.stdout, "values without the filter")


def test_manual():
    """The example of docs/formats.md, word for word but for its paths, on a run of the default types."""
    with open(os.path.join(ROOT, "docs", "formats.md"), encoding="utf-8") as f:
        example = re.search(r"(?:^    .*\n)*^    with h5py.File.*\n(?:^    .*\n)+", f.read(), re.M)[0]
    for shown, ours in (("build/plugins", os.path.join(BUILD, "plugins")), ("step-00000500", "runs/m1-np1-zstd/checkpoints/step-00000004")):
        check(example.count(shown) == 1, f"{shown} in the example:\n{example}")
        example = example.replace(shown, ours)
    environment = {k: v for k, v in os.environ.items() if k != "HDF5_PLUGIN_PATH"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(example) + "assert w.shape == (64, 64) and 0.001 < w.std() < 1"],
                          capture_output=True, text=True, env=environment)
    check(done.returncode == 0, done.stderr[-600:])


def test_broken_plugins():
    """What lies in the system's plugin folder does not concern us."""
    os.makedirs("broken", exist_ok=True)
    for name in ("libzstd_filter.so", "libh5lzf.so"):
        with open("broken/" + name, "wb") as f:
            f.write(b"\x7fELF nothing of the kind")
    ENVIRONMENT["HDF5_PLUGIN_PATH"] = os.path.abspath("broken")
    fp4d("inspect", "runs/m1-np1-zstd/checkpoints/step-00000004", "--verify")
    fp4d("train", "run.yaml", "--set", "run.folder=runs/m1-np1-zstd", "--set", "train.updates=5", "--set", "train.master=true", "--set",
         "checkpoint.keep=0")
    ENVIRONMENT.pop("HDF5_PLUGIN_PATH")


def test_two_ranks():
    tensors = run_and_read(True, 2)
    alone, _ = read_step("runs/m1-np1-zstd/checkpoints/step-00000004", 1)
    worst = max(abs(tensors[n] - alone[n]).max() for n in alone if n.startswith("master/"))
    check(worst < 0.05, f"two ranks' weights are {worst} away from one's")


def main():
    tests = {n[5:]: f for n, f in globals().items() if n.startswith("test_")}
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fp4d-h5py-") as folder:
        os.chdir(folder)
        os.mkdir("corpus")
        words = random.Random(1)
        for i in range(6):
            with open(f"corpus/{i}.txt", "w") as f:
                f.write(" ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(400)))
        with open("run.yaml", "w") as f:
            f.write(CONFIG)
        fp4d("prepare", "run.yaml")
        for name, test in tests.items():
            try:
                test()
                print("ok", name)
            except Exception as why:
                failed += 1
                print(f"not ok {name}: {why}".replace("\n", "\n# "))
        os.chdir("/")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
