"""What runs where in which order. Pure Python, no torch.

action.py    Op, Action and their text form "2F0"
schedule.py  Schedule: every rank's program; requires(), the one statement of dependence
generate.py  the table of generators: integers in, a schedule of computations out
two_versions.py  schedules whose steps overlap: their programs, how they begin and end
split.py     the rule by which a program with a split backward pass is made
lower.py     adds messages between stages and the end of the step: agreement, vote, optimizer
links.py     the two ends of a message, the order of messages on each directed link
exchange.py  what the replicas of a stage send each other
segments.py  the same where replicas are cut differently: which layers go together
size.py      how large a step may be
check.py     complete, in order, alike at both ends of a link, makes progress; what a rank holds
text.py      the grid, and the CSV that torch.distributed.pipelining loads

To add a schedule: a function that makes it, and a `Generator` in `generate.GENERATORS` that says
which parameters it takes. `tests/schedule/toy_schedule.py` is one.
"""
