"""Training on many machines over SSH, and renting them: `scripts/cluster` and `scripts/aws`.

hosts.py     the hosts file: which machines, which ranks run where
ssh.py       OpenSSH's client as a function call; the same on all machines at once
agent.py     runs on each machine, on the standard library alone
install.py   installs the project on every machine at one commit
job.py       a run: checked, started on all machines or on none, and stopped
measuring.py dpipe measure on all machines, and the file that it writes
watch.py     the logs of all ranks in one view until all have ended
shaping.py   applies a network profile to every machine, and removes it
collect.py   copies the files of a run to this machine
cluster.py   the commands of scripts/cluster
ec2.py       EC2 instances in several regions; every call can be printed instead of made
aws.py       the commands of scripts/aws
"""
