"""Moving a tensor to a neighbour.

base.py      the contract: Transport, and Directory, by which ranks learn of each other
kinds.py     TRANSPORTS: the transports by name, with their properties; without torch
link.py      one rank's end of the links with a peer: what is expected, arrived and went wrong
mesh.py      all links of one rank over connections: who dials, who is refused, opening and closing
sessions.py  a mesh whose connections break and are dialled again, whatever carries them
grpc.py      a mesh of gRPC streams: HTTP/2, TLS
tcp.py       a mesh of TCP or TLS connections, faster where nothing asks for HTTP/2
nccl.py      from GPU to GPU
local.py     ranks as threads of one process
shaped.py    any of these, with the delay and the rate of a network profile

To add a transport: write a class that keeps the contract in base.py, add it to TRANSPORTS and to
PAIRS in tests/transport/test_conformance.py. One over sockets can be a `mesh.Mesh`.
"""
