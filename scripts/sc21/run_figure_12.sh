#!/bin/sh
# The interleaved schedule: 175 billion parameters on 96 GPUs.
# Usage: run_figure_12.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" figure_12 "$@"
