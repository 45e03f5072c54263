"""A parameter server: averages the gradients of all replicas, steps, and gives parameters back.

Worker and server agree on

spec.py           the layout of a stage's parameters, and how they step
messages.py       what streams between the two

and the server is, from the arithmetic up,

gradient_sum.py   a step's gradient: whose chunks are in, and their mean in replica order
stage_state.py    its copy of a stage: parameters, moments, the step in progress
journal.py        what it keeps on disk: no acknowledged step is lost
stage_server.py   one stage for many callers: who waits for what, who commits
server.py         all stages, over gRPC

The worker's side is `paramworker/`.

To change what is sent: `protos/dpipe/wire/v1/parameters.proto` holds the messages and their order,
`messages.py` makes and reads them; raise its `PROTOCOL`, and both ends refuse an older one.
"""
