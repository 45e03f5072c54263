"""The command line: each command parses its arguments, then calls one function of a room below.

main.py            assembles the commands; errors become a message and an exit code
options.py         arguments and options of several commands, and the printing of answers
training.py        train, launch, serve
elastic.py         coordinate, join, leave, status
foresight.py       simulate, schedule, trace
planning.py        plan
model.py           generate, export, eval
measuring.py       bench, measure
configuration.py   config
watching.py        watch, report

To add a command: write it in the file of its group, with an example in its help, and add it to the
list in main.py. Import what it calls inside it, so that `dpipe --help` stays fast: nothing here
imports torch or pydantic at the top. tests/golden/cli_help.txt holds the help texts.
"""
