# What belongs to your cluster. Only `--mode slurm` needs it; a variable that is left empty is named.
SLURM_PARTITION=                       # sbatch --partition
SLURM_ACCOUNT=                         # sbatch --account
SLURM_TIME=00:30:00                    # of one case
GPUS_PER_NODE=8
DPIPE=dpipe                            # the command on the nodes, such as /shared/venv/bin/dpipe
DPIPE_FILES=                           # a text that all nodes see, such as /shared/corpus/*.txt
DPIPE_TOKENIZER=                       # a tokenizer.json of at most 51200 words, or: bytes
DPIPE_STEPS=10                         # of one case; the median of their seconds counts
DPIPE_RUNS=runs/sc21                   # a folder that all nodes and this machine see
