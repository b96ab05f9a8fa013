#!/usr/bin/env python3
"""The folder that `make bundle` makes: moved, on its own libraries, with the host's Open MPI and without any.

BUILD names the build folder (default build).  Prints "ok NAME" or "not ok NAME: why"
for each test; exit status 0 iff all are ok.
"""
import os
import re
import shutil
import subprocess
import sys

from fp4d import BUILD, DONE, ENVIRONMENT, ROOT, SYSTEM, Place, Skipped, check, main

place = Place()
bundle = place.at("moved", "to here")  # a name with a space
made = subprocess.run(["make", "-s", "bundle", "BUILD=" + os.path.relpath(BUILD, ROOT)], cwd=ROOT, stdout=subprocess.PIPE,
                      stderr=subprocess.STDOUT, text=True)
if made.returncode != 0:
    print("not ok bundle: make bundle failed\n" + made.stdout)
    sys.exit(1)
shutil.copytree(os.path.join(BUILD, "fp4d-bundle"), bundle, symlinks=True)
place.program = os.path.join(bundle, "bin", "fp4d")

SETTINGS = {"train.updates": 3, "optimizer.warmup_updates": 1}
GLIBC = r"lib(c|m|dl|rt|pthread|resolv)\.so|ld-linux|linux-vdso"
MPI = r"libmpi|libopen-|libhwloc|libevent|libudev|libpmix"


def loaded(**environment):
    """Library -> path, as the dynamic linker finds them for the bundle's program."""
    out = subprocess.run([os.path.join(bundle, "libexec", "fp4d")], env={"LD_TRACE_LOADED_OBJECTS": "1", **environment},
                         stdout=subprocess.PIPE, text=True)
    found = dict(re.findall(r"^\s*(\S+) => (.*?)(?: \(0x\w+\))?$", out.stdout, re.M))
    check(found, "the dynamic linker tells", out.stdout)
    return found


def test_every_library_is_its_own():
    for name, path in loaded().items():
        if not re.search(GLIBC + "|" + MPI, name):
            check(os.path.realpath(path).startswith(os.path.realpath(bundle) + "/lib/"), f"{name} is the bundle's", path)
    for name, path in loaded(LD_LIBRARY_PATH=os.path.join(bundle, "lib", "mpi")).items():
        if not re.search(GLIBC, name):
            check(os.path.realpath(path).startswith(os.path.realpath(bundle) + "/"), f"{name} is the bundle's", path)


def test_trains_like_the_build():
    place.run("own", SETTINGS)
    place.run("own-2", SETTINGS, 2)
    place.program = os.path.join(BUILD, "fp4d")
    place.run("build", SETTINGS)
    place.run("build-2", SETTINGS, 2)
    place.program = os.path.join(bundle, "bin", "fp4d")
    for np in ("", "-2"):
        check(place.updates("own" + np) == place.updates("build" + np), "the same updates" + np)


def test_plugin_and_documents():
    for name in ("plugins/libfp4d_zstd.so", "configs/demo.yaml", "docs/operations.md", "scripts/launch/mpirun.sh", "README.md"):
        check(os.path.exists(os.path.join(bundle, name)), f"{name} is there")


def test_launch_script():
    """Its program is the bundle's, in the folder where it was copied to."""
    done = subprocess.run(["scripts/launch/mpirun.sh", "--version"], cwd=bundle, capture_output=True, text=True, check=False,
                          env={**ENVIRONMENT, "NP": "2", "BIND": "none", "MPIRUN_ARGS": "--oversubscribe"})
    check(done.returncode == DONE and len(re.findall("^fp4d ", done.stdout, re.M)) == 2, f"exit code {done.returncode}", done.stdout + done.stderr)


def test_older_system():
    """A glibc that is older than the one it was made with is named, before the dynamic linker says it in riddles."""
    path = os.path.join(bundle, "lib", "glibc")
    with open(path) as f:
        was = f.read()
    with open(path, "w") as f:
        f.write("glibc 99.1\n")
    place.command("help").expect(SYSTEM, r"the bundle was made with glibc 99\.1")
    with open(path, "w") as f:
        f.write(was)
    place.command("help").expect(DONE)


def copy_with_libraries(program, root):
    """A program of this system and what it loads, at the same places below root."""
    text = subprocess.run(["ldd", program], stdout=subprocess.PIPE, text=True).stdout
    for path in [program] + re.findall(r"(/\S+) \(0x", text):
        to = root + path
        os.makedirs(os.path.dirname(to), exist_ok=True)
        if not os.path.exists(to):
            shutil.copy(os.path.realpath(path), to)


def test_bare_system():
    """glibc, a shell and five tools: no library of ours is installed, and no Open MPI."""
    root = place.at("bare")
    for name in ("bin", "lib", "lib64"):  # as here, where they may be links into /usr
        os.makedirs(root + "/usr/" + name, exist_ok=True)
        if os.path.islink("/" + name):
            os.symlink(os.readlink("/" + name), os.path.join(root, name))
    for tool in ("sh", "dirname", "readlink", "cat", "getconf", "sort", "head", "grep", "env"):
        copy_with_libraries("/bin/sh" if tool == "sh" else shutil.which(tool), root)
    for name, path in loaded().items():
        if re.search(GLIBC, name) and os.path.isabs(path):
            copy_with_libraries(path, root)
    os.makedirs(root + "/proc")  # $ORIGIN is read there
    apart = ["unshare", "-mpf" if os.geteuid() == 0 else "-rmpf", "--mount-proc=" + root + "/proc"]
    if subprocess.run([*apart, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        raise Skipped("unshare is not allowed here")
    os.makedirs(root + "/dev")
    open(root + "/dev/null", "w").close()  # where no device can be made, a file takes what is thrown away
    os.makedirs(root + "/home")
    shutil.copytree(bundle, root + "/opt/fp4d", symlinks=True)
    for name in ("tiny.yaml", "train.tokens", "validation.tokens"):
        shutil.copy(place.at(name), root + "/home/")

    def inside(*words):
        command = [*apart, "chroot", root, shutil.which("env"), "-C", "/home", "PATH=/usr/bin:/bin", *words]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)

    train = ["/opt/fp4d/bin/fp4d", "train", "tiny.yaml", "--set", "run.folder=bare", "--set", "train.updates=3",
             "--set", "optimizer.warmup_updates=1"]
    out = inside(*train)
    check(out.returncode == DONE and "update      3/3" in out.stdout, f"exit code {out.returncode}", out.stdout)
    out = inside("OMPI_COMM_WORLD_SIZE=2", *train)
    check(out.returncode == SYSTEM and "libmpi.so.40" in out.stdout, f"exit code {out.returncode}", out.stdout)


if __name__ == "__main__":
    sys.exit(main(globals(), place.close))
