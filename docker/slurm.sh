#!/bin/bash
# One peer of a run on several machines of a Slurm cluster: the cards of all of them train together as one site.
#
#   sbatch docker/slurm.sh https://run.example.org/run.toml
#   sbatch --nodes=1 docker/slurm.sh run.toml                 # one machine
#
# The working directory must be on a disk that all machines see, and MURMUR must name the same installation on each.
# Slurm sends SIGTERM two minutes before the time is up: the node tells the others and writes a checkpoint. Submit the
# script again, and the same peer goes on.
#SBATCH --job-name=murmuration
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=murmuration-%j.log
set -euo pipefail

RUN=${1:?name a run: sbatch docker/slurm.sh RUN}
MURMUR=${MURMUR:-murmur}
FOLDER=${FOLDER:-$PWD/murmuration-peer}
PORT=${PORT:-29400}
NODES=${SLURM_JOB_NUM_NODES:-1}

if [ "$NODES" -eq 1 ]; then
    exec srun "$MURMUR" join "$RUN" --dir "$FOLDER" --device all
fi

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
LOG=$PWD/murmuration-$SLURM_JOB_ID-head.log
umask 077 # the log has the token of the site, with which a machine may read and change the weights

srun --nodes=1 --ntasks=1 --nodelist="$HEAD" --output="$LOG" \
    "$MURMUR" join "$RUN" --dir "$FOLDER" --device all --site "$HEAD:$PORT" &
HEAD_STEP=$!

# The first machine prints the line for the others, with the token.
until MURMUR_SITE_TOKEN=$(sed -n 's/.*murmur rank .*--token \([^ ]*\).*/\1/p' "$LOG" 2>/dev/null | tail -n 1) &&
    [ -n "$MURMUR_SITE_TOKEN" ]; do
    kill -0 "$HEAD_STEP" 2>/dev/null || { cat "$LOG"; exit 1; }
    sleep 2
done
export MURMUR_SITE_TOKEN # in the environment, so that it is in no list of processes

srun --nodes=$((NODES - 1)) --ntasks=$((NODES - 1)) --exclude="$HEAD" "$MURMUR" rank "$HEAD:$PORT" --device all &
wait "$HEAD_STEP"
