"""Published models: transformers' own modules as our layers, their weights in and out. It needs the
extra `hf`.

extra.py           the way in, for rooms that must not import transformers
architectures.py   which of transformers' families are known, and how their names map to layers
source.py          where a model lies: a folder, a GGUF file or the hub, with its cache
index.py           which file holds which tensor
gguf_header.py     whether a GGUF file is as long as it says
tensors.py         weights by name, of one layer at a time
skeleton.py        a whole model without memory, from its config.json alone
structure.py       where the parts are in a family that has no entry
trial.py           whether such a family computes the same in parts
layers.py          parts of it as layers of a pipeline; their attention masks
encoder.py         the same of encoders, such as BERT
adapter.py         LoRA, as peft injects it
experts.py         the same on parameters in no linear layer, such as experts
trained_adapter.py one that was trained before
model.py           the list of layers that the rest of dpipe takes
words.py           the model's own tokenizer and chat template
dataset.py         the rows of a data set on the hub

To add a family: one entry in architectures.py, and a tiny configuration in
tests/hub/published.py, with which the tests compare every gradient with transformers' own.
"""
