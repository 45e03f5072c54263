"""How parameters step by their gradients: adamw, and others by name.

kinds.py        every optimizer and its properties, without torch
rule.py         what a rule is: the state of a parameter, and a step
adamw.py        AdamW, on whole parameters or on parts of them
rules.py        SGD, Lion, Adafactor, Muon
eight_bits.py   AdamW with moments of 8 bits, by torchao

To add one: write a rule, and declare it in `kinds.py`, with its properties and the
"package.module:function" that makes it. `tests/optimizers/toy_optimizer.py` is one in a single
file.
"""
