"""Who is there: joining, addresses, gathers, heartbeats, aborts and clock offsets of the ranks of
one run.

base.py      the contract that a run talks to, and `Gathered`, a gather under way
client.py    `Coordinator`: a rank's side of the stream
alone.py     `Alone`: the same for a run of one rank, without a server
meeting.py   what the coordinator decides: who may join, who is lost, which cause wins. No gRPC, no threads, no clock
server.py    `CoordinatorServer`: the streams of all ranks, around one meeting; lives in rank 0
frame.py     messages of any size on a stream of bounded ones
"""
