"""Bytes: what crosses a link, how it is written down, and how connections are opened.

spec.py        TensorSpec: shape and dtype of what crosses a stage boundary
format.py      FORMATS: wire formats by name, with their properties; without torch
codec.py       the same formats on tensors
packed.py      what codecs that pack values as bytes have in common
int_blocks.py  those of 6, 4, 3 and 2 bits
low_rank.py    tensors as products of thin matrices
top_k.py       the largest values alone
exponents.py   powers of two, between replicas
sparse.py      the largest values alone, in a bit each, between replicas
feedback.py    the wire format between replicas, with error feedback where it rounds much
options.py     what goes around a codec: rotation, error feedback
deltas.py      what a sample's activation has changed by since it was last sent
message.py     tensor <-> header and raw bytes; nothing is ever unpickled
staging.py     the way of a tensor between a GPU and host memory
transfer.py    Moved, Pending, Links: what a room asks of the links that it is given
schema.py      the shapes of JSON values from another machine, checked
text.py        text from another machine, with escapes for what a terminal would obey
token.py       a file of tokens, which may change while a run goes on
rpc.py         how every gRPC server and channel is opened: token, TLS, keep-alive
collective.py  how every torch.distributed group is opened

The classes in v1/ are generated from protos/dpipe/wire/v1.

To add a wire format: write its codec (`codec.Codec`) and add a `Format` to FORMATS, as
tests/wire/toy_format.py does in one file. Configuration, prediction and error feedback follow.
"""
