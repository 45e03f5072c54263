"""Which rank a process is, and how the ranks of a machine are started and stopped.

cores.py         which cores the ranks of tensor-parallel groups compute on
environment.py   which rank a process is; the only reader of the process's environment
imports.py       imports that stay, left out of the collection of garbage
launch.py        all ranks as processes of this machine: signals, logs, exit code
leash.py         the program between launcher and rank: the rank ends when the launcher dies
neighbours.py    whether two processes are on one machine
notice.py        waiting for a machine's notice that it will be taken away
signals.py       a rank that is asked to stop stops after its step

To add a launcher: a function as `_from_slurm` in environment.py, and its place in the order there.

To add a cloud's notice: a function in notice.py, and its name in the table there.
"""
