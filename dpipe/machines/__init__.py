"""Machines that are not alike: what each is, what this model's layers take on it, and the links
between them. One file, `machines.toml`. No torch.

machine.py  `Machine`, `LayerTime`, `Measurement`, `Cluster`: what the file says
file.py     from the file, and back
groups.py   ranks that were measured as a machine each, put together as a run takes them
hosts.py    the network between hosts, of a profile or of such a file
seats.py    which rank is on which machine, and what a simulation takes of that

    machines.toml --load_machines--> Cluster --+--network_of--> Network    links, interfaces
                                               |
                            seats: rank -> name+--hosts_of----> Host       cores that ranks share

To add a property of a machine: a field of `Machine` with its check, its key in file.py, and what it
means to those who read it: network_of, hosts_of, or the planner.
"""
