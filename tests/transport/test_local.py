import torch

from dpipe.transport.local import LocalHub


def test_error_of_the_other_end_is_not_raised_at_this_one() -> None:
    """A failed rank raises its error in its own waits; a neighbour that sends at that moment must
    not raise it.
    """
    hub = LocalHub(2)
    hub.ends[1, 0].error = SystemError("of rank 1")  # broken, but rank 0 does not know yet
    assert not hub.transport(0).send(torch.zeros(1), 1, "tag").done()
