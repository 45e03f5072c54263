"""A rank's part of a run whose machines come and go: one epoch after another in a process that
stays.

preparation.py what a machine does with a job before it offers itself
assignment.py  what a process is told for an epoch: its rank, the job, where the state is
control.py     ending an epoch from outside: after the step under way, or now
cadence.py     how many steps apart copies are taken
guard.py       copies of the rank's state, every few steps, here and on another machine
pieces.py      which pieces of the state a rank has
idle_time.py   when the links of a rank have nothing to send
state.py       the state of the rank's layers, and when it is whole
epoch.py       `run_epoch`: join, take the state, train, leave nothing behind

To change what a rank takes into the next epoch: `EpochState` of state.py says what is kept, and
when; copies.py of `keeper` how it is written.
"""
