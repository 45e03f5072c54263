"""What the layers of any model take and hold, found by trying one pass of each. Takes torch.

layer_costs.py     operations, shapes and time of each layer
launcher_costs.py  the same, from a launcher to its ranks
measured.py        what layers hold: a pass on fake tensors
allocations.py     what tensors take, from allocation to release

To add something that a layer costs: put it in `layer_costs.LayerCost`, and in the schema of
launcher_costs.py. The formulas of a GPT and of a BERT are in `stage/families.py` and `memory/`.
"""
