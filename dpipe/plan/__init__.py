"""What a run will be, decided before it starts: which layers make a stage, in which order, and how
long a step takes.

forecast.py         cut, schedule, simulate: what `dpipe simulate` says and what a run does
run_plan.py         the same for a run, with its model and its text; a user's own model
costs.py            what layers and stages cost: seconds, and bytes on the wire
tensor_parallel.py  what sharing a stage's layers among ranks costs
partition.py        which layers make a stage
assumed_network.py  the network that a prediction assumes
on_machines.py      what a step takes where machines differ
deltas.py           what links need that send what a sample has changed by
recurring.py        which samples come again, for them, and where they keep them
own_layers.py       what a user's own layers take and hold, for a search
machine.py          whether a run can be on this machine
text.py             what `dpipe simulate` prints

forecast.py and what it imports need no torch, so that a step can be predicted anywhere.
machine.py, run_plan.py, recurring.py and own_layers.py do.

To change what is predicted: `forecast` puts it into `Forecast`, text.py prints it. What a family of
models costs by formula is declared in `stage/families.py`.
"""
