"""A slice of the model on one device: layers are the unit, and a layer computes the same bits
wherever the model is cut.

base.py             the contract of a stage, as executor, trainer and checkpoints use it
families.py         the model families and what others need to know of each (no torch)
model.py            a model as a list of layers and a loss; a user's own model
gpt.py              a decoder-only transformer as such a list
bottleneck.py       a GPT that passes few numbers a token from layer to layer
bert.py             BERT as such a list
stage.py            forward and backward of one micro-batch over some of the layers
replay.py           a stage that waits instead of computing
master_weights.py   parameters in half precision, and the fp32 master weights that learn
tensor_group.py     the ranks of a tensor-parallel group, and their collectives
tensor_parallel.py  a layer on those ranks, each with a part of every matrix; its loss
scatter.py          what each of those ranks sends to the next stage
flops.py            arithmetic and parameters of a transformer by formula (no torch)

To add a model family: its layers and loss in a file such as gpt.py, which returns a `LayeredModel`,
and one entry in families.py.
"""
