"""The measurements of Narayanan et al. 2021 (SC21): simulated here, or run through Slurm on a
cluster.

CONFIG.sh        what belongs to a cluster; run_*.sh: one table or figure each
case.py          a point: a GPT, how it is cut, its batch
experiments.py   the cases of each, and what the paper says of it
cluster.py       machines of eight A100s as the simulator sees them
rows.py          a case's seconds as throughput: table and plot
slurm.py         a case as a batch job of `dpipe train`, and what it measured
run.py           the command behind every run_*.sh
"""
