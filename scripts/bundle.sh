#!/usr/bin/env bash
# Makes a folder that runs where none of the libraries are installed: make bundle.
#   scripts/bundle.sh PROGRAM PLUGIN FOLDER
# PROGRAM is linked with the rpath $ORIGIN/../lib.  The folder may be moved; it holds
#
#   bin/fp4d         what users call: finds the libraries, then the program
#   libexec/fp4d     the program
#   lib/             its libraries, glibc's excepted
#   lib/mpi/         Open MPI's, for a host without Open MPI (one process then)
#   plugins/         HDF5's zstd filter for h5py and h5dump (HDF5_PLUGIN_PATH)
#   configs/ docs/ scripts/ README.md
#
# CUDA's libraries and NCCL come from the host, and so does Open MPI where it is
# installed: its transports and its launcher must be of one build.
set -euo pipefail
[ $# -eq 3 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 64; }
program=$1 plugin=$2 folder=$3
root=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)

# What a file loads, as paths; what every glibc system has is left out.
loads() {
  ldd "$1" | awk '/=> not found/ { print "scripts/bundle.sh: " $1 " is not installed" > "/dev/stderr"; bad = 1 }
                  $2 == "=>" && $3 ~ /^\// && $1 !~ /^(ld-linux|lib(c|m|dl|rt|pthread|resolv)\.so)/ { print $3 } END { exit bad }'
}
# Libraries that PROGRAM itself asks for, as paths.
direct() {
  local needed
  needed=$(objdump -p "$program" | awk '$1 == "NEEDED" { print "/" $2 "$" }')
  loads "$program" | grep -f <(printf '%s\n' "$needed")
}

new=$folder.new
rm -rf "$new"
mkdir -p "$new"/bin "$new"/libexec "$new"/lib/mpi "$new"/plugins
cp "$program" "$new/libexec/fp4d"
cp "$plugin" "$new/plugins/"

mpi=$(direct | grep '/libmpi\.so' || true)
own=$(for library in $(direct | grep -v '/libmpi\.so'); do echo "$library"; loads "$library"; done | sort -u)
for library in $own; do cp -L "$library" "$new/lib/"; done
if [ -n "$mpi" ]; then
  for library in $mpi $(loads "$mpi"); do
    [ -e "$new/lib/${library##*/}" ] || cp -L "$library" "$new/lib/mpi/"
  done
fi

(cd "$root" && tar -cf - README.md configs docs scripts) | tar -xf - -C "$new"
sed -i 's,build/fp4d,bin/fp4d,' "$new/scripts/launch/mpirun.sh"
getconf GNU_LIBC_VERSION > "$new/lib/glibc"

cat > "$new/bin/fp4d" <<'WRAPPER'
#!/bin/sh
# fp4d with the libraries beside it. Open MPI is the host's where it has libmpi.so.40.
here=$(dirname "$(readlink -f "$0")")/..
wanted=$(cat "$here/lib/glibc") have=$(getconf GNU_LIBC_VERSION 2>/dev/null)
if [ "$(printf '%s\n%s\n' "$wanted" "$have" | sort -V | head -n 1)" != "$wanted" ]; then
  echo "fp4d: this host has ${have:-no glibc}, the bundle was made with $wanted: make it on a system as old as the oldest host" >&2
  exit 71
fi
if LD_TRACE_LOADED_OBJECTS=1 "$here/libexec/fp4d" | grep -q 'libmpi\.so.*not found'; then
  if [ -n "${OMPI_COMM_WORLD_SIZE:-}${PMIX_RANK:-}" ]; then
    echo "fp4d: started by a launcher of MPI, but libmpi.so.40 (Open MPI 4) is not found: add its folder to LD_LIBRARY_PATH" >&2
    exit 71
  fi
  LD_LIBRARY_PATH=$here/lib/mpi${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
fi
exec "$here/libexec/fp4d" "$@"
WRAPPER
chmod +x "$new/bin/fp4d"

rm -rf "$folder"
mv "$new" "$folder"
echo "$folder: $(du -sh "$folder" | cut -f1), $(find "$folder/lib" -name '*.so*' | wc -l) libraries"
