"""Bytes: what crosses a link, and how it is written down.

spec.py      TensorSpec: shape and dtype of what crosses a stage boundary
format.py    wire formats by name and size, without torch
codec.py     the same formats on tensors: none, bf16, fp16, int8 by block
message.py   tensor <-> header and raw bytes; nothing is ever unpickled
transfer.py  Moved, Pending, Links: transfers under way, as rooms that use links see them
rpc.py       how every gRPC server and channel is opened: token, TLS, keep-alive
collective.py  how every torch.distributed group is opened
v1/          generated from protos/dpipe/wire/v1
"""
