"""A parameter server as a process of its own, which outlives what its workers are.

standalone.py  what `dpipe serve` does: listen, keep each step, end with the run
announcing.py  telling an elastic run where the server is now

To change what a server keeps: `paramserver/journal.py`. To tell a run more of it: a field of
`ServerMoved` in elastic/messages.py, which `agent.server` takes.
"""
