# Settings of your cluster. Only `--mode slurm` needs them; an error names those that are still empty.
SLURM_PARTITION=                       # sbatch --partition
SLURM_ACCOUNT=                         # sbatch --account
SLURM_TIME=00:30:00                    # of one case
GPUS_PER_NODE=8
DPIPE=dpipe                            # the command on the nodes, such as /shared/venv/bin/dpipe
DPIPE_FILES=                           # text files that all nodes can read, such as /shared/corpus/*.txt
DPIPE_TOKENIZER=                       # a tokenizer.json of at most 51200 tokens, or: bytes
DPIPE_STEPS=10                         # of one case; the result is their median time
DPIPE_RUNS=runs/sc21                   # a folder that all nodes and this machine share
