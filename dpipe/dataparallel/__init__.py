"""Keeps the replicas of a stage equal: by its gradients, or now and then by its parameters.

base.py             the contract of a kind, and its table of what happens when
kinds.py            every kind and its properties, without torch
setup.py            what the builder of a kind is given

The kinds that need no server:

single.py           one replica: its gradient is already the mean
allreduce.py        every replica averages the whole gradient and takes the whole step
sharded.py          every replica holds the optimizer's state of its shard (ZeRO)
local_sgd.py        replicas step by themselves, and average parameters now and then (DiLoCo)

What they are made of:

optimizer.py        a rule of `optimizers/` on whole parameters or on slices of them
flat.py             a stage's parameters as one flat vector
direct_exchange.py  reduce-scatter and all-gather over dpipe's links, part by part
torch_group.py      all-reduce by a torch.distributed group: gloo or NCCL
background.py       exchanges beside the compute, used a step late where that is wanted
by_segment.py       replicas that are cut differently: each segment of the layers by itself
ahead.py            where replicas compute while the last step's gradient is still on its way

To add a kind: declare it in `kinds.py`, with its properties and the "package.module:function" that
builds it. The function takes a `setup.ReplicaSetup` and returns a `base.DataParallel`; nothing else
has to change. `tests/dataparallel/toy_kind.py` is one in a single file.
"""
