#!/bin/sh
# Weak scaling of pipeline parallelism: three layers a stage, 1 to 8 stages.
# Usage: run_figure_11.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" figure_11 "$@"
