#!/bin/sh
# Pipeline against data parallelism: 5.9 billion parameters on 64 GPUs.
# Usage: run_figure_14.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" figure_14 "$@"
