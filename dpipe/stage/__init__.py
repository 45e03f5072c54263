"""A slice of the model on one device: layers are the unit, and layer i behaves the same wherever it
lives.

base.py       the contract of a stage, as executor, trainer and checkpoints use it
model.py      a model as a list of layers and a loss; a user's own model
gpt.py        a decoder-only transformer as such a list; bert.py: one that looks both ways
stage.py      forward and backward of one micro-batch over some of the layers
recompute.py  which part of a layer is run again in backward
masters.py    parameters in half precision, and the fp32 masters that learn
tensor_parallel.py  a layer on several ranks, each with a part of every matrix; vocabulary.py: its loss
tensor_group.py     what those ranks exchange; scatter.py: what they send to the next stage
linear.py     splitting the backward pass: weight gradients that can wait
seeding.py    random numbers that depend on what is drawn for, and on nothing else
flops.py      arithmetic and parameters of both by formula (no torch)
efficiency.py how much of a device's arithmetic a step uses (no torch)
partition.py  which layers make a stage (no torch)
probe.py      arithmetic, size and time of each layer of any model
replay.py     a stage whose compute is a wait of given length
"""
