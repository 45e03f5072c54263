import torch

from dpipe.transport.local import LocalHub


def test_error_of_the_other_end_is_not_raised_at_this_one() -> None:
    """A rank that failed tells its own error to its own waits; a neighbour that sends just then
    must not get it.
    """
    hub = LocalHub(2)
    hub.ends[1, 0].error = SystemError("of rank 1")  # broken, but rank 0 does not know yet
    assert not hub.transport(0).send(torch.zeros(1), 1, "tag").done()
