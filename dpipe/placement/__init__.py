"""Which machine holds which layers, where machines and links are not alike: a search by an
estimate. No torch for dpipe's own models.

search.py     shapes and their placements, the best first
climb.py      a better placement from a good one
recut.py      a cut for each replica, by the speed of its own machines
starts.py     where a search begins
balance.py    where to cut the model for machines of unequal speed
objective.py  what is to be least, within which budget
priced.py     which machines a placement uses, and what they cost
estimate.py   how long a step of many placements takes, quickly
problem.py    a job and its machines, with all that a search looks up
tables.py     what layers take and hold, summed up
fleet.py      the machines as arrays
choices.py    what the job leaves open
shape.py      all that a plan decides but the placement

To add a decision: a field of `PlanShape`, what may be chosen in choices.py, where search.py tries
it, and what it means to estimate.py and to `planner/evaluate.py`.
"""
