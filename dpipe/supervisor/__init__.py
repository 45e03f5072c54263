"""Machines of an elastic run that are processes of this one: started, watched, and replaced.

machine_process.py  such a machine: how it is started, and killed
local_machines.py   what `dpipe launch --spares` does: all of them
given_processes.py  what `dpipe train --spares` does: one for each process that a scheduler started

To add another way to start machines: an `agent.coordinate.OwnMachines` made of `MachineProcess`.
"""
