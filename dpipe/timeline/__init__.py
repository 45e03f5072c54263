"""When things happen, predicted or measured, in one type. Pure Python, no torch.

span.py       Span and Timeline
cost.py       what each stage takes, and what each hop carries
scenario.py   what a simulation is of: schedule, cost, network, hosts, replicas, ballots
simulate.py   a steady step of a schedule on a network, a step alone, and the step time
simulation.py the model behind them, event by event
machine.py    the clock, the cores of a host and the egress of a rank, in a simulation
exchanges.py  the replicas of a pipeline in a simulation, and what their stages exchange
votes.py      the ballots before an optimizer step in a simulation
summary.py    bubble, overlap, bytes a link

To change what a prediction knows of: the model is listed in `simulation.py`; each number that it
needs is a field of `Cost`, which `plan/costs.py` estimates and `report/trace.py` measures; what a
step runs on is a field of `Scenario`.
"""
