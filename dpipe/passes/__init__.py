"""A layer's forward and backward pass run otherwise than at once, with the same result.

slices.py     a sequence in slices: keys, values and their gradients from one to the next
linear.py     splitting the backward pass: weight gradients that can wait
recompute.py  attention cores run again in backward
seeding.py    random numbers that depend only on what they are drawn for

To change what a layer keeps between forward and backward: the file of that choice, and what
`memory/` says that it holds.
"""
