#!/usr/bin/env bash
# Starts fp4d under Open MPI: scripts/launch/mpirun.sh train CONFIG [...]
#
# Without settings this is the line for one GB200 NVL72 rack, 18 hosts of 4 GPUs:
#
#   mpirun -np 72 --map-by ppr:4:node --bind-to numa -x NCCL_DEBUG=WARN ... fp4d train CONFIG
#
# Settings (environment):
#   NP         ranks in all                               (72)
#   PER_NODE   ranks on each host                         (4, or NP if that is less)
#   BIND       numa | none | core | ...                   (numa; none for a CPU run on one host)
#   HOSTFILE   file of "host slots=4" lines; Slurm needs none
#   FP4D       the program                                (build/fp4d)
#   MPIRUN     the launcher                               (mpirun)
#   MPIRUN_ARGS  further words for mpirun, e.g. "--mca coll ^hcoll" (HPC-X on GB200
#              and GB300, where HCOLL is not supported) or "--oversubscribe"
# Variables named NCCL_*, UCX_* and FP4D_* go to every rank, and so do LD_LIBRARY_PATH, CUDA_HOME and
# CUDA_LAUNCH_BLOCKING: mpirun hands no others to other hosts.
#
# Signals to this script: USR1 saves a checkpoint and goes on; USR2, TERM, INT
# and HUP (but under nohup) save one and stop (exit code 75).  mpirun itself would
# turn TERM into SIGKILL after about two seconds: too early for a checkpoint, so
# TERM goes on as USR2.
# The exit code is fp4d's (docs/operations.md).
set -u
. "$(dirname "$(readlink -f "$0")")/wait.sh" || exit 71

[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 64; }

np=${NP:-72}
per_node=${PER_NODE:-4}
[ "$per_node" -le "$np" ] || per_node=$np

words=(-np "$np" --map-by "ppr:$per_node:node" --bind-to "${BIND:-numa}")
[ -z "${HOSTFILE:-}" ] || words+=(--hostfile "$HOSTFILE")
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
while IFS= read -r name; do words+=(-x "$name"); done < <(compgen -e | grep -E '^((NCCL|UCX|FP4D)_|(LD_LIBRARY_PATH|CUDA_HOME|CUDA_LAUNCH_BLOCKING)$)')
# shellcheck disable=SC2206 # several words on purpose
words+=(${MPIRUN_ARGS:-})

job='' interrupted='' early=''
# shellcheck disable=SC2317 # called by the traps
forward() { # SIGNAL
  interrupted=1
  if [ -n "$job" ]; then kill "-$1" "$job" 2> /dev/null; else early=$1; fi
}
trap 'forward USR1' USR1
trap 'forward USR2' USR2 TERM INT HUP

# A process group of its own (-m): Ctrl-C reaches mpirun only through this script.
set -m
"${MPIRUN:-mpirun}" "${words[@]}" "${FP4D:-build/fp4d}" "$@" < /dev/null &
job=$!
set +m
[ -z "$early" ] || kill "-$early" "$job"

wait_for_job
exit "$code"
