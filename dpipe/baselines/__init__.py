"""Somebody else's engine, our numbers: each comparison measures both in one run and reports their
ratio.

bench.py              `dpipe bench`: the comparisons that need no second machine
foreign.py            one rank of another engine on our configuration: placed as ours, with the rows of a run
fsdp.py               the configured GPT on torch alone: torch.distributed.pipelining, and FSDP2 over replicas
gloo.py               a tensor from one process to another: torch.distributed's gloo against our transports
loopback.py           delay and rate of this machine's loopback, as a transport sees it
megatron.py           the configured GPT on megatron-core: tensor x pipeline x data parallel
megatron_weights.py   our parameters under Megatron's names, and each tensor parallel rank's part of them
mfu.py                how much of a device one GPT uses: a plain training loop against our engine
rate.py               one end of a link between two hosts: what it carries
torch_pipelining.py   the same GPT on torch.distributed.pipelining and on dpipe, step by step
torch_replay.py       torch.distributed.pipelining on a replay configuration, one process a rank
torch_schedule.py     what torch.distributed.pipelining runs one of our schedules by
"""
