"""Copies of a model's state in memory, in pieces: kept by a process that outlives an epoch, and
served.

pieces.py    what a piece is: a layer, or a rank's part of one
copies.py    a piece's state at a step, in the format of checkpoints, as bytes with a digest
messages.py  what is asked of a keeper over a connection, and its schemas
keeper.py    `Keeper`: what one process holds, its bounds, and its port
server.py    who may ask, and the answers
client.py    fetching copies from a keeper, and sending them

To add a request: a shape in messages.py, a case in server.py, a method in client.py. What a keeper
decides about it, such as what it has no room for, is keeper.py's.
"""
