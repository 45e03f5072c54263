#!/bin/sh
# Strong scaling: 174.6 and 529.6 billion parameters, the same batch on up to four times the GPUs.
# Usage: run_strong_scaling.sh --mode sim|slurm|real [--dry-run] [--folder FOLDER]
exec "$(dirname "$0")/run" strong_scaling "$@"
