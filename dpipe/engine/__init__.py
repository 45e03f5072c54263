"""The loop that trains, and nothing else: one rank's program, its vote and its step.

executor.py    runs a rank's program over stages and a transport, up to the vote
hop_codecs.py  what tensors are on the wire between stages
recorder.py    the spans of what the rank does
ballot.py      what a rank says at the end of a step, and its schema
best.py        the lowest held-out loss so far, and when to give up waiting for a lower one
update.py      the vote of all ranks, and the optimizer step
trainer.py     the loop over steps: data, executor, vote, step, metrics, evaluation, checkpoints
versions.py    a stage with two versions of its weights, for steps that overlap
replay_ring.py the tensor-parallel group of a replayed stage, over the run's links
rehearsal.py   one step without messages before the first, which NCCL needs

To add an action: `schedule/action.py` names it, `Schedule.requires()` says what it waits for,
`schedule/lower.py` puts it into programs and `schedule/check.py` expects it there; then the
`match` of the executor and that of `timeline/simulate.py` say what it does and what it takes.
"""
