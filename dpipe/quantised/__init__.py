"""Matrices that do not learn, in 8 or 4 bits: what is left of a base beside its adapter (QLoRA,
Dettmers et al. 2023).

matrix.py    such a matrix, or a stack of them, and how it is made again
linear.py    in place of a linear layer
stacks.py    in place of the stacks in a module that is none, such as the experts of a mixture
layers.py    all of a layer's

To add a kind: in matrix.py its codes and how they become values, and its name in `adapter.base`.
"""
