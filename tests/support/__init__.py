"""Helpers for the tests of several rooms. Helpers for one room are beside its tests.

certificates.py   an authority for tests of TLS
greedy.py         a schedule of `search.greedy`
layered.py        replicas as threads, on a stage of two small layers
settled.py        looks again at what a busy machine may have made late
small_job.py      the configuration of a GPT of four layers, and its text
tracked.py        what torch's memory tracker sees of a rank's program
warm_python.py    pytest plugin: an interpreter that has imported torch and dpipe already
warm_server.py    the program behind it, which forks
whole_runs.py     pytest plugin: fixtures that run a whole configuration, ranks as threads

To add a file: two rooms' tests need it. Import it as `support.NAME`; `tests/` is on the path.
"""
