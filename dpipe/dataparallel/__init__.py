"""Replicas of a stage agree: on its gradient, or now and then on its parameters.

base.py       the contract, and what it asks of a transport
optimizer.py  AdamW on whole parameters or on slices of them
single.py     one replica: nothing to agree on
row.py        a stage's gradient as one row of numbers
exchange.py   reduce-scatter and all-gather between replicas, direct, part by part
allreduce.py  every replica averages all of the gradient and takes the whole step
"""
