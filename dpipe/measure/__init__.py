"""What the machines of a run and the links between them are, measured before it starts.

measure.py       `Measuring`: all of it, in the order in which all ranks go through it
this_machine.py  what can be read of a machine
layers.py        what this model's layers take on it
rounds.py        which pairs are measured when, and for how long
connections.py   the open connections between every two ranks
notes.py         what the two ends of a pair say to each other
pings.py         delay and jitter
traffic.py       rate and loss: streams of bytes
tcp_info.py      what the kernel knows of a TCP connection
reports.py       what ranks share of what they have found, and its bounds
doctor.py        what of this machine would hurt a run, and how to mend it
found.py         all reports put together: machines by name, and links

To add a property of links: a field of a report with its bounds, where it is measured, and its place
in found.py; what it means to readers is said in `machines/`.
"""
