#!/bin/sh
# Activation recomputation: 145 billion parameters on 128 GPUs.
# Usage: run_figure_17.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" figure_17 "$@"
