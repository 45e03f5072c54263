"""`python -m netem`."""

from netem.cli import main

main(prog_name="python -m netem")
