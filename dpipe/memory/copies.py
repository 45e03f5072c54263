"""What copies of layers take in the memory of a process (`keeper`), in bytes. No torch.

own       the last that all ranks have whole, and the one under way     2 states
others'   the same of each rank that sends its copies here              2 states each
packing   one more, while a copy is taken                               1 state
"""

from dpipe.optimizers.kinds import OPTIMIZERS

_KEPT = 2


def state_bytes(parameter_bytes: int, optimizer: str) -> int:
    """A state: parameters, counted in fp32, and what `optimizer` keeps of them, at most."""
    kept = OPTIMIZERS[optimizer].state_of(parameter_bytes, is_end=True)
    return parameter_bytes + kept


def copies_bytes(parameter_bytes: int, others: int, optimizer: str) -> int:
    """Of a rank with `parameter_bytes` of parameters, counted in fp32, and as many of each of
    `others`. Epochs that end before a copy is whole everywhere hold up to twice as much.
    """
    num_states = _KEPT * (1 + others) + 1
    return num_states * state_bytes(parameter_bytes, optimizer)
