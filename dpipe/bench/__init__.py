"""Two ways to do one thing, measured in turns in one run, and their ratio.

bench.py              `dpipe bench`: the comparisons that need no second machine
gloo.py               a tensor between two processes: gloo against our transports
allreduce.py          the mean of a row over four processes: gloo against our exchange
loopback.py           delay and rate of this machine's loopback, as a transport sees it
gpt_size.py           the GPT that mfu.py and torch_pipelining.py train on two engines
mfu.py                how much of a device one GPT uses: a plain training loop against our engine
hidden.py             how much of the time of a GPU's sends its kernels hide, as a profiler sees it
processes.py          the processes of a bench on this machine
formats.py            wire formats: bits a value, error, time of a core
rate.py               one end of a link between two hosts: what it carries
torch_pipelining.py   the same GPT on torch.distributed.pipelining and on dpipe, step by step

To add a bench: a function from a `Pace` to rows, and its entry in `bench._BENCHES` and the CLI's
`BENCHMARKS`.
"""
