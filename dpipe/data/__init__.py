"""Text to tokens to batches: what a step is fed with, the same on every rank that asks.

corpus.py      text to tokens, cached; windows of it
sampling.py    tokens drawn from a model's distribution, one at a time
rows.py        rows of jsonl, csv, parquet and such files and URLs, each with its place
samples.py     rows to samples, chats and such, to sequences of several samples
stream.py      the same of rows that are read while the run trains
read_ahead.py  items that a thread makes before they are asked for
bert_data.py   what BERT reads: two passages, some words masked out
masked.py      what a published encoder reads: windows, some words masked out
feed.py        a step's batch as a function of (seed, step, replica), cut into micro-batches
batch.py       the type of such a batch

To add a format: write a feed with `training` and `held_out` (feed.py), let `feed_of` choose it, and
give the model family that reads it a property in `stage/families.py`.
"""
