"""Moving a tensor to a neighbour.

base.py    the contract: Transport, Pending, Moved
link.py    one rank's end of the links with a peer: what is expected, what has arrived, what went wrong
local.py   ranks as threads of one process
grpc.py    ranks as processes and machines: several HTTP/2 connections a link, TLS
shaped.py  any of them, with the delay and the rate of a network profile
"""
