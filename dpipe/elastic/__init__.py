"""Machines that come and go: who holds which rank, epoch by epoch; the run outlives them all.

agents.py      what the coordinator knows of a machine, and what it decides for an epoch
lineage.py     which copies of the model belong to the run as it goes on, and the newest whole one
seating.py     who takes which rank, who keeps whose copies, who has which pieces
rendezvous.py  what the coordinator decides: when an epoch ends, and where the next one begins
attendance.py  what an agent decides: when it works, stops and gives up
messages.py    what agents and the coordinator say to each other, and its schemas
servers.py     where parameter servers are that are processes by themselves
journal.py     what the coordinator must not forget, in SQLite

An epoch is one run of `run/` with fixed ranks. What decides has no clock, no thread and no socket:
tests/simulated drives them through thousands of broken clusters.

To add something that may happen to a machine: a method of `Rendezvous`, its arrow in the picture
there, and the fault in tests/simulated/faults.py.
"""
