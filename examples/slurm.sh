#!/usr/bin/env bash
# 2 nodes of 4 GPUs under SLURM:  sbatch examples/slurm.sh
#
# Lightning reads the number of processes, their ranks and the first node's name from SLURM; the Trainer's `devices` and
# `num_nodes` must say the same as the lines below.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:20:00
#SBATCH --signal=SIGUSR1@90
#SBATCH --output=%x-%j.log
set -euo pipefail

# One process per GPU. On links of 1 Gbit/s and less, try --trainer.strategy.comm_hook=int8 as well.
srun python examples/digits.py fit \
    --trainer.accelerator=gpu --trainer.devices=4 --trainer.num_nodes=2 \
    --trainer.strategy=lightning_ddp_hooks.DDPHooksStrategy --trainer.strategy.bucket_cap_mb=auto
