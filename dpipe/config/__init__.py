"""Every setting of a run: read from TOML, checked, frozen, the same on each rank. No torch here.

section.py    what sections are made of: Section, number types, Name (a choice of a table)
model.py      [model], [replay], [data]
run.py        [train], [run], [transport], [timeouts], [predict], [node]
wires.py      pipeline.wire: the format of each link, in each direction
parallel.py   [pipeline], [tensor_parallel], [data_parallel]
presets.py    sizes of published models by name
checks.py     what spans sections
trust.py      whose code a configuration may run
elastic.py    what machines that come and go cannot do yet
load.py       Config: all sections together; load, build
reference.py  every key with type, default, allowed values and meaning, for people and programs
effective.py  what a file comes to: the value of every key, and from where it is

To add a key: add a field with a default to its section, and its meaning as a string below it, in a
sentence or two with the unit and what leaving it out means. What it may be together with keys of
other sections is a function in checks.py. `dpipe config` and the reference page show it by
themselves.
"""
