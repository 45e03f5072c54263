"""How much each rank holds, in bytes, before it holds anything. `timeline/memory.py` walks through
the schedule with it.

layers.py       from what a layer's passes hold to what its stage does
measured.py     a user's own layers: run on fake tensors
allocations.py  what tensors take, from allocation to release
formulas.py     the layers of a GPT or a BERT: by formula, without torch
ends.py         the formulas of embedding and head
block.py        the formulas of a block
sizes.py        how large a transformer's tensors are: what the formulas count with
exchange.py     what keeping replicas in agreement holds
fit.py          the stages of a run, whether they fit, and what would

To change a layer of a GPT or a BERT: change its formula, too; tests/plan/memory/test_memory.py says
where it is off, and `measured.measured` by how many bytes.
"""
