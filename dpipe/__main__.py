"""`python -m dpipe`, for torchrun: `torchrun --nproc-per-node 4 -m dpipe train CONFIG`."""

from dpipe.cli.main import main

main(prog_name="dpipe")
