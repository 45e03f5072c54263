#!/bin/sh
# Weak scaling: 1.7 billion to a trillion parameters on 32 to 3072 GPUs.
# Usage: run_table_1.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" table_1 "$@"
