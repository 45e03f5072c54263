"""Moving a tensor to a neighbour.

base.py    the contract: Transport, Pending, Moved
link.py    one rank's end of the links with a peer: what is expected, what has arrived, what went wrong
local.py   ranks as threads of one process
mesh.py    all the links of one rank: who dials, who is refused, how links open and end
grpc.py    ranks as processes and machines: several HTTP/2 connections a link, TLS
nccl.py    from GPU to GPU; staging.py is the way between a GPU and the host memory that the others read and write
tcp.py     the same over plain TCP or TLS, faster where nothing asks for HTTP/2; stream.py carries its bytes and
           greeting.py is how its two ends come to trust each other
shaped.py  any of them, with the delay and the rate of a network profile
"""
