"""Replicas of a stage agree: on its gradient, or now and then on its parameters.

base.py       the contract, and what it asks of a transport
optimizer.py  AdamW on whole parameters or on slices of them
single.py     one replica: nothing to agree on
row.py        a stage's parameters as one row of numbers
feedback.py   numbers on the wire, with error feedback where they are rounded much
exchange.py   reduce-scatter and all-gather between replicas, direct, part by part
group.py      the same by a torch.distributed group: gloo or NCCL
flights.py    exchanges under way beside the compute, and a step late where that is wanted
ahead.py      where replicas compute while the gradient of the step before is on its way
allreduce.py  every replica averages all of the gradient and takes the whole step
sharded.py    every replica holds the optimizer of its shard
local_sgd.py  replicas step by themselves, and agree on parameters now and then

The parameter server, a kind of its own:

layout.py     what a worker and a server must agree on
ledger.py     whose pieces of a gradient are in, added in replica order
master.py     the server's copy of a stage: parameters, moments, the step under way
journal.py    what it keeps on disk: no acknowledged step is lost
shelf.py      one stage for many callers: who waits for what
line.py       what streams between the two
server.py     the server, over gRPC
client.py     a worker's line to it, which outlives a server that is killed
served.py     the kind, as a worker sees it
"""
