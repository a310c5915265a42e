#!/bin/bash
# One run on several nodes by Slurm: `sbatch experiments/launch/slurm.sh --preset arithmetic ...`,
# from the repository's root. Arguments after the script's name go to experiments.train; the
# same line again continues the run. The processes find each other by what Slurm tells them.
#SBATCH --job-name=rljax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8      # one process a GPU: JAX gives each the one of its local number
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue                # after a node failure the same run goes on
set -euo pipefail

# On a file system that all nodes see.
RUN_DIR=${RUN_DIR:-$PWD/runs/$SLURM_JOB_NAME}

# --kill-on-bad-exit: where one process dies, none waits for it.
srun --kill-on-bad-exit=1 --label \
    python -m experiments.train --run_dir="$RUN_DIR" --heartbeat_timeout=100 "$@"
