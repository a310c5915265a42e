#!/bin/bash
# One run on several nodes with Slurm: `sbatch experiments/launch/slurm.sh --preset arithmetic ...`,
# from the repository's root. The script's arguments are passed on to experiments.train. The same
# command again continues the run. JAX gets the addresses of the processes from Slurm.
#SBATCH --job-name=rljax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8      # one process for each GPU, assigned by local rank
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue                # after a node failure the run continues
set -euo pipefail

# On a file system that all nodes share.
RUN_DIR=${RUN_DIR:-$PWD/runs/$SLURM_JOB_NAME}

# --kill-on-bad-exit: when one process dies, Slurm ends the others.
srun --kill-on-bad-exit=1 --label \
    python -m experiments.train --run_dir="$RUN_DIR" --heartbeat_timeout=100 "$@"
