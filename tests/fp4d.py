"""What tests of the program from outside share: a corpus, a tiny run, launching, records, tensors.

BUILD names the build folder (default build).  Every wait has a limit; a process that a test leaves
behind is killed and fails the test.  Standard library only.
"""
import contextlib
import glob
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.abspath(os.environ.get("BUILD", os.path.join(ROOT, "build")))
PROGRAM = os.path.join(BUILD, "fp4d")

# Exit codes, docs/operations.md.
DONE, USAGE, DATA, DEVICE, SYSTEM, CHECKPOINT, PREEMPTED, COMMUNICATION, CONFIG, DIVERGED = (
    0, 64, 65, 69, 71, 74, 75, 76, 78, 80)

os.environ["HDF5_PLUGIN_PATH"] = os.path.join(BUILD, "plugins")  # for h5py: compressed checkpoints
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI", "PRTE_"))}
ENVIRONMENT.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", LC_ALL="C")

SEQ, BATCH = 64, 8

NOBODY = 65534  # the user of as_nobody

# Seconds after which a thing counts as hanging: far above what a slow, loaded machine needs.
LIMIT = 900

# A fault must end the world of itself: well before what it does instead (sleeps of 300 s), on any machine.
SOON = 100


class Wrong(Exception):
    """A test's expectation that did not hold."""


class Skipped(Exception):
    """The machine lacks what a test needs."""


def check(condition, what, text=""):
    if not condition:
        raise Wrong(what + ("\n" + text if text else ""))


# ---- processes --------------------------------------------------------------


def descendants(pid):
    """Living processes (not zombies) below pid."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as f:
                    fields = f.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def stat(pid):
    """Of /proc: the letter R, S, T, Z, ... and the moment of the process's start; "" and 0 where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
            return fields[0], int(fields[19])
    except OSError:
        return "", 0


def processor_seconds():
    """What the processes that were waited for have computed so far: another load of the machine does not change it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Result:
    def __init__(self, code, text, seconds):
        self.code, self.text, self.seconds = code, text, seconds

    def __iter__(self):
        return iter((self.code, self.text, self.seconds))

    def expect(self, code, *patterns):
        """The exit code, and every pattern in the output; also that nothing crashed."""
        check(self.code == code, f"exit code {self.code}, expected {code}", self.text)
        for pattern in patterns:
            check(re.search(pattern, self.text), f"expected to read: {pattern}", self.text)
        return self


class Job:
    """A launched command; its output and every process that it had."""
    living = []

    def __init__(self, command, cwd, prepare=None, **more):
        self.output = tempfile.TemporaryFile(mode="w+", errors="replace")
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT,
                                        stdin=subprocess.DEVNULL, cwd=cwd, env={**ENVIRONMENT, **more},
                                        preexec_fn=prepare)
        self.family = {}  # start by process id: the number may be another process's later
        Job.living.append(self)

    def alive(self):
        """Those of the processes seen below this one that live."""
        return [p for p, start in self.family.items() if stat(p)[1] == start and stat(p)[0] not in ("Z", "")]

    def look(self):
        for p in descendants(self.process.pid):
            self.family[p] = stat(p)[1]
        return self.alive()

    def await_stop(self):
        """Until a SIGSTOP has taken effect, or the process has ended."""
        until = time.monotonic() + LIMIT
        while stat(self.process.pid)[0] not in ("T", "Z", "") and time.monotonic() < until:
            time.sleep(0.001)

    def ranks(self, program=PROGRAM):
        """Process ids of fp4d, in order of rank."""
        found = []
        for pid in self.look() + [self.process.pid]:
            try:
                if os.readlink(f"/proc/{pid}/exe") == os.path.realpath(program):
                    with open(f"/proc/{pid}/environ", "rb") as f:
                        rank = re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)", b"\0" + f.read())
                    found.append((int(rank.group(1)) if rank else 0, pid))
            except OSError:
                pass
        return [pid for _, pid in sorted(found)]

    def text(self):
        # Opened anew: a seek of our descriptor would move the place where the job writes, too.
        with open(f"/proc/self/fd/{self.output.fileno()}", errors="replace") as f:
            return f.read()

    def wait_for(self, pattern, limit=LIMIT):
        until = time.monotonic() + limit
        while True:
            over = time.monotonic() > until or self.process.poll() is not None  # asked before the last look
            text = self.text()
            if re.search(pattern, text):
                break
            check(not over, f"no '{pattern}'", text)
            time.sleep(0.005)
        self.look()

    def end(self, limit=LIMIT):
        """Fails where the command or one of its processes stays."""
        until = time.monotonic() + limit
        while self.process.poll() is None and time.monotonic() < until:
            self.look()
            time.sleep(0.01)
        seconds, code = time.monotonic() - self.began, self.process.poll()
        until = time.monotonic() + SOON
        while self.alive() and time.monotonic() < until:
            time.sleep(0.01)
        left = self.alive()
        for p in left + ([self.process.pid] if code is None else []):
            os.kill(p, signal.SIGKILL)
        self.process.wait()
        Job.living.remove(self)
        text = self.text()
        self.output.close()
        check(code is not None, f"not ended after {limit} s", text)
        check(not left, f"{len(left)} processes outlive the launcher", text)
        return Result(code, text, seconds)


def take_hangups():
    """For prepare: as a program starts that is not under nohup, even where this test is."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def ignore_hangups():
    """For prepare: as under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def need_root():
    if os.geteuid() != 0:
        raise Skipped("needs root")


def as_nobody():
    """For prepare: as another user, where root would be let in."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def kill_living():
    """What a failed test left running."""
    for job in list(Job.living):
        for pid in job.look() + ([job.process.pid] if job.process.poll() is None else []):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        job.process.wait()
        Job.living.remove(job)


def launcher(np, program=PROGRAM):
    """np 0: the program by itself, a world of one without MPI."""
    if np == 0:
        return [program]
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(np), program]


# ---- a place with a corpus and runs -----------------------------------------

CONFIG_BASE = {
    "run.seed": 42, "run.threads": 1, "model.vocab_size": 258, "model.hidden_size": 64, "model.ffn_size": 128,
    "model.n_layers": 2, "model.n_heads": 2, "model.n_kv_heads": 1, "model.rope_theta": 10000,
    "data.train": "train.tokens", "data.validation": "validation.tokens", "train.updates": 12, "train.global_batch": BATCH, "train.local_batch": 2,
    "train.seq_len": SEQ, "optimizer.lr": 3e-3, "optimizer.schedule": "cosine", "optimizer.min_lr": 3e-4,
    "optimizer.warmup_updates": 3, "validation.samples": 4, "log.peak_flops": 1e11,
    "limits.start_s": LIMIT, "limits.update_s": LIMIT, "limits.save_s": LIMIT}


def write_corpus(folder, skip, files, each):
    """Text of this repository: `files` documents of `each` bytes, after the first `skip` ones."""
    os.makedirs(folder)
    paths = sorted(p for pattern in ("docs/*.md", "base/*.[ch]", "kernels/*.h", "model/*.[ch]", "trainer/*.[ch]")
                   for p in glob.glob(os.path.join(ROOT, pattern)) if os.path.getsize(p) >= each)
    check(len(paths) >= skip + files, f"{skip + files} files of {each} bytes in the repository")
    for i, path in enumerate(paths[skip:skip + files]):
        with open(path, "rb") as f, open(os.path.join(folder, f"{i:02d}.txt"), "wb") as out:
            out.write(f.read(each))


def write_config(path, settings):
    """Settings by dotted key, as YAML."""
    sections, text = {}, []
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    for section, values in sections.items():
        if section:
            text.append(section + ":")
        for name, value in values.items():
            text.append(("  " if section else "") + f"{name}: {json.dumps(value)}")
    with open(path, "w") as f:
        f.write("\n".join(text) + "\n")


def words(settings):
    """Settings by dotted key, as --set arguments."""
    out = []
    for key, value in settings.items():
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, list):
            value = ",".join(value)
        out += ["--set", f"{key}={value}"]
    return out


def built_in_routes():
    """Names of the table of routes, as docs/config.md lists them."""
    with open(os.path.join(ROOT, "docs", "config.md")) as f:
        return re.findall(r"`([^`]+)`", f.read().split("## Values of route\n")[1].split("\n## ")[0])


def route_settings(route):
    """A built-in route in a shape that all of them fit."""
    return {"model.hidden_size": 128, "model.ffn_size": 256, "train.seq_len": 128, "train.global_batch": 4, "train.updates": 4,
            "optimizer.warmup_updates": 1, "validation.samples": 2, "route": route,
            "train.param_dtype": "fp32" if route == "fp32" else "bf16",
            "model.n_layers": 6 if re.search(r"last4|27-5", route) else 2}


class Place:
    """A temporary folder with prepared streams and a configuration, tiny.yaml.

    The training stream of 12 documents of 256 bytes holds 48 samples: update 6 ends the first epoch.
    """

    def __init__(self, files=12, each=256, program=PROGRAM, **settings):
        if not os.path.exists(program):
            sys.exit(f"not ok program: {program} is missing; BUILD names the build folder")
        self.path = tempfile.mkdtemp(prefix="fp4d-test-")
        os.chmod(self.path, 0o755)
        self.program = program
        self.seen = {}  # tensors by checkpoint
        self.settings = {**CONFIG_BASE, **settings}
        write_config(self.at("tiny.yaml"), self.settings)
        write_corpus(self.at("corpus"), 0, files, each)
        write_corpus(self.at("held-out"), files, 6, each)
        self.prepare("train.tokens", "corpus")
        self.prepare("validation.tokens", "held-out")

    def prepare(self, stream, corpus):
        self.command("prepare", "tiny.yaml", "--force", "--set", f"data.sources={corpus}", "--set", f"data.train={stream}",
                     "--set", "data.validation=").expect(DONE)

    def close(self):
        shutil.rmtree(self.path, ignore_errors=True)

    def at(self, *parts):
        return os.path.join(self.path, *parts)

    def open_to_all(self, path):
        """A copy that every user gets at: this tree may lie below a folder that others may not enter, such as /root."""
        copy = self.at("open-to-all", path.strip("/").replace("/", "_"))
        if not os.path.exists(copy):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            shutil.copy(path, copy)
            for p in (os.path.dirname(copy), copy):
                os.chmod(p, 0o755)
        return copy

    def start(self, *arguments, np=0, prepare=None, environment=None):
        program = self.open_to_all(self.program) if prepare is as_nobody else self.program
        return Job(launcher(np, program) + list(arguments), self.path, prepare, **(environment or {}))

    def command(self, *arguments, np=0, limit=LIMIT, prepare=None, environment=None):
        return self.start(*arguments, np=np, prepare=prepare, environment=environment).end(limit)

    def start_train(self, name, settings=None, np=0, more=(), **options):
        return self.start("train", "tiny.yaml", *words({"run.folder": name, **(settings or {})}), *more, np=np, **options)

    def train(self, name, settings=None, np=0, more=(), limit=LIMIT, **options):
        """Trains in the folder `name`; settings on top of tiny.yaml."""
        return self.start_train(name, settings, np, more, **options).end(limit)

    def run(self, name, settings=None, np=0, more=()):
        """A run that must end well."""
        return self.train(name, settings, np, more).expect(DONE)

    def lines(self, name, kind=None):
        """Records of metrics.jsonl; every line must be whole.  Numbers stay as they were written."""
        with open(self.at(name, "metrics.jsonl")) as f:
            text = f.read()
        check(text.endswith("\n"), "metrics.jsonl ends with a whole line")
        records = [json.loads(line, parse_float=str) for line in text.splitlines()]
        return [r for r in records if kind is None or r["kind"] == kind]

    def updates(self, name):
        """What each update computed, without times and what a process says once."""
        timed = ("seconds", "exchange_wait_ms", "data_wait_ms", "tokens_per_second", "tokens_per_second_per_rank", "mfu",
                 "device_memory_bytes", "contractions")
        return [{k: v for k, v in r.items() if k not in timed} for r in self.lines(name, "update")]

    def column(self, name, key):
        return [float(r[key]) if key in ("loss", "grad_norm", "lr") else r[key] for r in self.lines(name, "update")]

    def steps(self, name):
        """Updates of the checkpoints there, ascending."""
        names = os.listdir(self.at(name, "checkpoints"))
        return sorted(int(n[5:]) for n in names if re.fullmatch(r"step-\d{8}", n))

    def step(self, name, update):
        return self.at(name, "checkpoints", f"step-{update:08d}")

    def temporaries(self, name):
        return [n for n in os.listdir(self.at(name, "checkpoints")) if n.endswith(".tmp")]

    def meta(self, name, update):
        with open(os.path.join(self.step(name, update), "manifest.json")) as f:
            return json.loads(json.load(f)["meta"])

    def tensors(self, name, update):
        """A checkpoint's tensors, however they are cut: a digest by name.  Without h5py the
        validation NLL of each sequence stands for the parameters."""
        step = self.step(name, update)
        key = (step, os.stat(os.path.join(step, "manifest.json")).st_mtime_ns)
        if key not in self.seen:
            self.seen[key] = self.read_tensors(step)
        return self.seen[key]

    def read_tensors(self, step):
        if have_h5py():
            out = subprocess.run([H5PY_PYTHON, "-c", TENSOR_DIGESTS, step], capture_output=True, text=True, timeout=LIMIT)
            check(out.returncode == 0, "tensors of " + step, out.stderr)
            return json.loads(out.stdout)
        self.command("eval", step, "tiny.yaml", "--json", "eval.json").expect(DONE)
        with open(self.at("eval.json")) as f:
            return json.load(f)["sequence_nll"]

    def epoch_samples(self):
        with open(self.at("train.tokens"), "rb") as f:
            tokens = struct.unpack_from("<Q", f.read(64), 24)[0]
        return (tokens - 1) // SEQ


H5PY_PYTHON = "/usr/bin/python3"
TENSOR_DIGESTS = """
import glob, hashlib, json, sys, h5py, numpy
pieces, whole = {}, {}
def visit(name, d):
    if isinstance(d, h5py.Dataset):
        pieces.setdefault(name, []).append((int(d.attrs['first_row']), d[()]))
        whole[name] = (int(d.attrs['global_rows']), int(d.attrs['cols']))
for path in sorted(glob.glob(sys.argv[1] + '/rank-*.h5')):
    with h5py.File(path, 'r') as f:
        f.visititems(visit)
out = {}
for name, parts in pieces.items():
    parts.sort(key=lambda p: p[0])
    t = numpy.concatenate([p[1] for p in parts])
    assert t.shape == whole[name], (name, t.shape, whole[name])
    out[name] = hashlib.sha256(t.tobytes()).hexdigest()
print(json.dumps(out))
"""


def have_h5py():
    if not hasattr(have_h5py, "answer"):
        try:
            have_h5py.answer = subprocess.run([H5PY_PYTHON, "-c", "import h5py"], capture_output=True, timeout=LIMIT).returncode == 0
        except OSError:
            have_h5py.answer = False
    return have_h5py.answer


# ---- comparing --------------------------------------------------------------


def same(a, b, what):
    """Equal lists of records or mappings; says the first difference."""
    check(len(a) == len(b), f"{what}: {len(a)} and {len(b)} entries")
    check(len(a) > 0, f"{what}: nothing to compare")
    for k in a if isinstance(a, dict) else range(len(a)):
        x, y = a[k], b.get(k) if isinstance(b, dict) else b[k]
        if x != y:
            if isinstance(x, dict) and isinstance(y, dict):
                x, y = ({k: v[k] for k in v if x.get(k) != y.get(k)} for v in (x, y))
            raise Wrong(f"{what}: entry {k} differs\n{x}\n{y}")


def near(a, b, relative, what):
    check(len(a) == len(b) and len(a) > 0, f"{what}: {len(a)} and {len(b)} entries")
    for i, (x, y) in enumerate(zip(a, b)):
        check(abs(x - y) <= relative * abs(y), f"{what}: entry {i}: {x} and {y} differ by more than {relative:g}")


# ---- the frame --------------------------------------------------------------


def main(tests, close=None):
    """Runs functions test_NAME of a module's globals(); arguments: names of tests to run."""
    found = {k[5:]: v for k, v in tests.items() if k.startswith("test_")}
    failed = 0
    for name in sys.argv[1:] or list(found):
        began = time.monotonic()
        try:
            found[name]()
            print(f"ok {name}  # {time.monotonic() - began:.1f} s", flush=True)
        except Skipped as why:
            print(f"ok {name} # skipped: {why}", flush=True)
        except (Wrong, OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError) as why:
            failed += 1
            text = str(why) if isinstance(why, Wrong) else f"{type(why).__name__}: {why}"
            print("\n# ".join(f"not ok {name}: {text}".splitlines()), flush=True)
        finally:
            kill_living()
    if close:
        close()
    return 1 if failed else 0
