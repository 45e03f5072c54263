"""Who is there: joining, addresses, gathers, heartbeats, aborts and clock offsets of one run.

base.py        the contract that a run uses, and `Gathered`, a gather under way
client.py      `Coordinator`: a rank's end of the stream
abortable.py   what nothing can interrupt, given up where the run is over
alone.py       `Alone`: the same for a run of one rank, without a server
membership.py  what the server decides: who may join, who is lost, which cause wins; no I/O
server.py      `CoordinatorServer`: the streams of all ranks around one membership, in rank 0
shared.py      the schemas of what ranks share as a run begins and ends
limits.py      what a rank may send: names from closed lists, and bounds
frame.py       messages of any size on a stream of bounded ones
line.py        those messages both ways, over a session that outlives streams

To add a message: a field in protos/dpipe/wire/v1/coordinator.proto, a case in client.py and
server.py, and the decision, if there is one, in membership.py, which is tested without a network.
"""
