"""How much each rank holds, in bytes, before it holds anything. No torch.

layers.py    from what a layer's passes hold to what its stage does, of any model
formulas.py  what the layers of a GPT or a BERT hold
ends.py      the formulas of their embedding and head
block.py     the formulas of their blocks
sizes.py     how large a transformer's tensors are: what the formulas count with
copies.py    what copies of layers hold, for a run whose machines come and go
exchange.py  what keeping replicas in agreement holds
walk.py      what a rank holds at the worst moment of a step: through its schedule, action by action
fit.py       the stages of a run, whether they fit, and what would

`probe/measured.py` measures a user's own layers, and takes torch.

To change a layer of a GPT or a BERT: change its formula with it. tests/memory/test_memory.py says
where a formula is off, and `plan.measured.measured` says by how many bytes.
"""
