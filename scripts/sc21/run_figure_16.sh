#!/bin/sh
# Micro-batch size: 91 billion parameters on 64 GPUs.
# Usage: run_figure_16.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" figure_16 "$@"
