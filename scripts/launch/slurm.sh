#!/usr/bin/env bash
# Batch script for one GB200 NVL72 rack: sbatch scripts/launch/slurm.sh CONFIG [...]
# run from the repository; other sizes: sbatch -N 2 --ntasks-per-node=4 ... (no edit needed).
#
# Ten minutes before the time limit Slurm sends USR1 to this shell alone (B:); it
# asks fp4d for a checkpoint and a stop (USR2).  TERM, on preemption, does the same.
# fp4d then exits with 75, and only then the job goes back into the queue; the same
# command line resumes from the newest checkpoint.  Any other code ends the job.
# The lead (@600) must exceed one update plus one save.
#SBATCH --job-name=fp4d
#SBATCH --nodes=18
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --segment=18
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=fp4d-%j.log
set -u

[ $# -gt 0 ] || { echo "usage: sbatch scripts/launch/slurm.sh CONFIG [...]" >&2; exit 64; }
cd "${SLURM_SUBMIT_DIR:?this script runs under sbatch}" || exit 71
. scripts/launch/wait.sh || exit 71

echo "fp4d: job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, $(date -u +%FT%TZ)"

export PER_NODE=${PER_NODE:-${SLURM_NTASKS_PER_NODE:-4}}
export NP=${NP:-${SLURM_NTASKS:-$((${SLURM_JOB_NUM_NODES:?} * PER_NODE))}}

job='' interrupted=''
trap 'interrupted=1; [ -z "$job" ] || kill -USR2 "$job" 2> /dev/null' USR1 USR2 TERM
scripts/launch/mpirun.sh train "$@" &
job=$!

wait_for_job

echo "fp4d: exit code $code, $(date -u +%FT%TZ)"
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID" || exit 75
fi
exit "$code"
