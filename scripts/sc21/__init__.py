"""The measurements of Narayanan et al. 2021 (SC21), simulated here or run on a Slurm cluster.

CONFIG.sh        settings of a cluster; run_*.sh: one table or figure each
case.py          one point: a GPT, its parallel layout, its batch
experiments.py   the cases of each table and figure, and what the paper says about it
cluster.py       the simulator's model of machines with eight A100s
rows.py          the throughput of a case: table and plot
slurm.py         a case as a batch job of `dpipe train`, and its measured result
run.py           the command behind every run_*.sh
"""
