"""When things happen, predicted or measured, in one type. Pure Python, no torch.

span.py      Span and Timeline
simulate.py  Cost; simulate(): a schedule on a network, before there is a run
greedy.py    a split backward pass that follows the clock of a network
search.py    schedule "auto": what the simulator finds fastest under a memory limit
summary.py   bubble, overlap, bytes a link; predicted beside measured
chrome.py    a trace for Perfetto and chrome://tracing
"""
