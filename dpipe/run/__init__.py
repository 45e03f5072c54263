"""Composition: a configuration and a process's rank become a rank that trains.

api.py                from Python: dpipe.train for one rank, dpipe.launch for all of a machine
start.py              what `dpipe launch` and `dpipe train` start, once a configuration is checked
build.py              the composition root: what a rank is made of, put together
join.py               a rank joins the others: coordinator and links
stages.py             the stages of one rank
tensor_groups.py      tensor-parallel groups find each other
agreement.py          the configured kind of data parallelism, built
parameter_servers.py  the run's parameter servers: in its ranks, or by themselves
resume.py             which checkpoint every rank has, and copying its values in
generate.py           text from a checkpoint
measuring.py          what `dpipe measure` does: join the others, measure, write the file
planning.py           `pipeline.plan = "auto"`: measure, plan, and then start
results.py            trace inputs, summary and sample at the end of a run

To change what a rank is made of: build.py's `assemble`, and the file above that makes the part.
"""
