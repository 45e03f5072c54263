#!/bin/sh
# The scatter/gather optimisation: 175 billion parameters on 96 GPUs, interleaved.
# Usage: run_figure_18.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" figure_18 "$@"
