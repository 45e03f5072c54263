"""What "auto" takes: the best order of computations on a network, and formats. No torch.

auto.py         the search, from candidates to the best one
candidates.py   what it begins with: what generators make, and rules
clock.py        when each computation happens, fast
greedy.py       orders by a rule that follows the clock
improve.py      a better order from a good one, along its critical path
slices.py       the search where sequences are cut into slices
wire_choice.py  wire "auto": the format of each link
inner_steps.py  inner_steps "auto": how seldom replicas average
bound.py        what no order can beat

To change what the search is after: the score of `PipelineClock`, and the objective in `auto.py`.
"""
