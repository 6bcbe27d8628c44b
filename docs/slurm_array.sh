#!/bin/bash
# A run, its readout, or a fit as a Slurm array: one task a shard, counted from 1, one GPU a task.
#
#   sbatch --array=1-8 docs/slurm_array.sh run outputs/liar --agent llama-3.1-8b --judge rules
#   sbatch --array=1-8 docs/slurm_array.sh rounds outputs/liar --model llama-3.1-8b
#   sbatch --array=1-8 docs/slurm_array.sh fit outputs/llama.margin.safetensors --model llama-3.1-8b --corpus wikitext
#
# When all tasks are done:
#
#   klb-probe merge outputs/liar.shards/* --out outputs/liar
#   klb-probe merge outputs/liar/signals.shards/* --out outputs/liar/signals
#   klb-probe merge outputs/llama.margin.safetensors.shards/* --out outputs/llama.margin.safetensors
#
# A task that was stopped is sent again by its number, with the size of the whole array in SHARDS (Slurm would count 1):
#
#   SHARDS=8 sbatch --array=3 docs/slurm_array.sh run outputs/liar --agent llama-3.1-8b --judge rules
#
#SBATCH --job-name=klb-probe
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=klb-probe-%A-%a.log
set -euo pipefail

usage="usage: sbatch --array=1-N slurm_array.sh run|rounds|fit OUT OPTIONS"
command=${1:?$usage} out=${2:?$usage}
shift 2
i=$SLURM_ARRAY_TASK_ID
n=${SHARDS:-$SLURM_ARRAY_TASK_COUNT}

# What is done already is kept: a run or a fit goes on with --resume, a readout that was not whole is read again.
case $command in
  run)    exec klb-probe run --shard "$i/$n" --out "$out.shards/$i-of-$n" --resume "$@" ;;
  fit)    part=$out.shards/$i-of-$n.${out##*.}
          [ -e "$part" ] || exec klb-probe fit --shard "$i/$n" --out "$part" --resume "$@" ;;
  rounds) exec klb-probe rounds "$out" --shard "$i/$n" --overwrite "$@" ;;
  *)      echo "$usage" >&2; exit 2 ;;
esac
