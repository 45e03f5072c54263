"""Somebody else's engine, our numbers: each comparison measures both in one run and reports their ratio.

gloo.py    a tensor from one process to another: torch.distributed's gloo against our transports
"""
