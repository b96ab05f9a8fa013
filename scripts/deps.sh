#!/bin/sh
# Installs the Debian/Ubuntu packages that fp4d is built, demonstrated and
# tested with, when it may; otherwise prints the one command to run.  The CUDA toolkit
# is not among them: the CUDA backends are built where it is installed (docs/gpu.md).
#   scripts/deps.sh build|demo|check     (each includes the ones before it)
set -eu

build="build-essential pkg-config git libopenmpi-dev openmpi-bin libhdf5-dev libyaml-dev libjansson-dev libxxhash-dev zlib1g-dev libzstd-dev libpcre2-dev"
demo="$build python3 procps anarchism"
check="$demo strace zstd gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static python3-h5py hdf5-tools libopenblas-dev"

case "${1:-build}" in
  build) wanted=$build ;;
  demo) wanted=$demo ;;
  check) wanted=$check ;;
  *) echo "usage: scripts/deps.sh build|demo|check" >&2; exit 64 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "not a Debian or Ubuntu machine: install the equivalents of: $wanted" >&2
  exit 0
fi

missing=""
for package in $wanted; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ]; then
  become=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  become="sudo"
else
  echo "packages are missing; as root run:" >&2
  echo "  apt-get update && apt-get install -y --no-install-recommends$missing" >&2
  exit 71
fi
echo "installing:$missing"
$become apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $become apt-get install -y -qq --no-install-recommends $missing >/dev/null
