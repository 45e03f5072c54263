"""Before a run on machines that are not alike: what is best there, why, and as a file. No torch for
dpipe's own models.

command.py    `dpipe plan`, from files to text
decide.py     the search, then the simulator among the best dozen: a `Decided`
evaluate.py   how long a step takes in the simulator
explain.py    why it is as fast as it is, and what would make it faster
impossible.py why no plan fits
text.py       what `dpipe plan` prints
whole_model.py how the job's layers are counted
picture.py    the same as a picture: machines, their layers, and how full links are
plan_file.py  `plan.toml`
fits.py       whether a plan fits a job and its machines

    job.toml ----+--> placements --simulator--> Decided --> text, plan.toml
    machines.toml

To add a decision: see the room `placement`; what the run takes of it goes into `plan_of` of
decide.py and `DECIDED` of plan_file.py.
"""
