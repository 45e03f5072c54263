"""What runs where in which order. Pure Python, no torch.

action.py    Op, Action and their text form "2F0"
plan.py      Schedule: every rank's program; requires(), the one statement of dependence
exchange.py  what the replicas of a stage send each other until they agree
links.py     the two ends of a message, the order of messages on each directed link
generate.py  gpipe, 1f1b, interleaved, zero-bubble, forward-only: integers in, a compute-only schedule out
split.py     the rule by which a program with a split backward pass is made
lower.py     adds send, receive, reduce and step
check.py     complete, in order, the same order at both ends of a link, makes progress; what it holds
text.py      the grid, and the CSV that torch.distributed.pipelining loads
"""
