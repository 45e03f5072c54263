"""A worker's side of the parameter server: one more kind of data parallelism.

client.py   one stage's calls, repeated while the server is away
kind.py     the kind itself, behind the contract of `dataparallel/base.py`

To add a call: its method of `StageClient`, which goes through `_repeat`, and its handler in
`paramserver/server.py`; a call may come twice, and must then change nothing.
"""
