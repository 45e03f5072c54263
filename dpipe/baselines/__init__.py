"""Compares dpipe with other engines: each comparison measures both in one run and reports their
ratio.

bench.py              `dpipe bench`: the comparisons that need no second machine
foreign.py            one rank of another engine on our configuration: same place, same rows
fsdp.py               the GPT on torch alone: torch.distributed.pipelining, FSDP2 over replicas
gloo.py               a tensor between two processes: gloo against our transports
allreduce.py          the mean of a row over four processes: gloo against our exchange
loopback.py           delay and rate of this machine's loopback, as a transport sees it
megatron.py           the GPT or BERT on megatron-core: tensor x pipeline x data parallel
megatron_weights.py   our parameters by Megatron's names, and each tensor-parallel rank's part
mfu.py                how much of a device one GPT uses: a plain training loop against our engine
rate.py               one end of a link between two hosts: what it carries
torch_pipelining.py   the same GPT on torch.distributed.pipelining and on dpipe, step by step
torch_replay.py       torch.distributed.pipelining on a replay configuration, a process a rank
torch_schedule.py     one of our schedules as a schedule of torch.distributed.pipelining

To add a bench: a function from a `Pace` to rows, and its entry in `bench._BENCHES` and the CLI's
`BENCHMARKS`. To add an engine: `check_config` and `make_step`, as in `fsdp.py`.
"""
