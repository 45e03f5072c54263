"""Somebody else's engine, our numbers: each comparison measures both in one run and reports their ratio.

mfu.py     how much of a device one GPT uses: a plain training loop against our engine
gloo.py    a tensor from one process to another: torch.distributed's gloo against our transports
"""
