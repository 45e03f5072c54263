"""Many machines over SSH, and where to rent them; `scripts/cluster` and `scripts/aws` are its two
executables.

hosts.py     the hosts file: which machines, which ranks run where
ssh.py       OpenSSH's client as a function call; the same on all machines at once
agent.py     the other end: runs on each machine, standard library alone
install.py   the project on every machine at one commit
job.py       a run: checked, started on all machines or on none, stopped
watch.py     every rank's log in one view, through lost connections, until all have ended
shaping.py   a network profile on every machine, or off
collect.py   what a run has left, brought here
cluster.py   the commands of scripts/cluster
ec2.py       instances by the dozen, in several regions; every call is printed or made
aws.py       the commands of scripts/aws
"""
