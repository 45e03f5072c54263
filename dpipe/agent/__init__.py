"""An elastic run's processes: the coordinator's, and the agent of each machine that joins.

server.py          the agents' connections around one `Rendezvous`, and each epoch's coordinator
methods.py         what it answers over gRPC
serving.py         where and how it listens
job.py             what that asks of the job
digests.py         what ranks say of the copies that others keep for them
knocking.py        whether a process whose connection broke is still there
coordinate.py      what `dpipe coordinate` does: check the job, keep the journal, serve the agents
claiming.py        how it comes to its term, where another could coordinate the run, too
standing.py        who has which rank, since when and how fast, as `dpipe status` shows it
goodput.py         what a run has lost to machines that came and went
rows.py            metrics.jsonl of a run whose rank 0 moves from machine to machine
control_stream.py  an agent's end of its stream, which it opens again where it breaks
process.py         a machine's agent: one epoch after another, as it is told
joining.py         what `dpipe join` does: a keeper, an agent, and what asks it to leave
inquiry.py         what `dpipe status` and `dpipe leave` ask

To add a message: a shape in elastic/messages.py, a case in server.py and in process.py, and the
decision, if there is one, in `Rendezvous` or `Attendance`, which need no network to be tested.
"""
