"""When things happen, predicted or measured, in one type. Pure Python, no torch.

span.py      Span and Timeline
simulate.py  Cost; simulate(): a schedule on a network, before there is a run
replicas.py  Replicas of a pipeline, whose stages exchange gradients on the same network
machine.py   the clock, the cores of a host and the egress of a rank, while a schedule unfolds
greedy.py    a split backward pass that follows the clock of a network
search.py    schedule "auto": what the simulator finds fastest under a memory limit
timers.py    where a rank's time goes, in the words of Megatron-LM
summary.py   bubble, overlap, bytes a link; predicted beside measured
chrome.py    a trace for Perfetto and chrome://tracing
"""
