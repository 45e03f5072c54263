#!/bin/sh
# Pipeline against tensor parallelism: 162.2 billion parameters on 64 GPUs.
# Usage: run_figure_13.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" figure_13 "$@"
