import threading

import torch
from torch import nn

from dpipe.passes.seeding import Undrawn, paused, seeded


def draw(*key: str | int) -> list[float]:
    with seeded(*key):
        return torch.rand(3).tolist()


def test_draw_depends_on_its_key_alone() -> None:
    first = draw("draw", 0, 5)
    torch.rand(7)
    assert draw("draw", 0, 5) == first


def test_keys_that_differ_in_one_part_draw_different_numbers() -> None:
    keys = [
        ("draw", 0, 1, 2),
        ("draw", 0, 2, 1),
        ("draw", 1, 1, 2),
        ("layer", 0, 1, 2),
        ("draw", 0, 12),
    ]
    assert len({tuple(draw(*key)) for key in keys}) == len(keys)


def test_generator_of_the_caller_is_restored() -> None:
    torch.manual_seed(3)
    undisturbed = torch.rand(4).tolist()
    torch.manual_seed(3)
    before = torch.rand(2).tolist()
    draw("draw", 1)
    assert before + torch.rand(2).tolist() == undisturbed


def test_interleaved_threads_draw_by_their_keys() -> None:
    """One draws, waits while the other draws, and draws again."""
    drawn, other = [], list[float]()
    with seeded("draw", 1):
        drawn += torch.rand(1).tolist()
        with paused():
            thread = threading.Thread(target=lambda: other.extend(draw("draw", 2)))
            thread.start()
            thread.join(10)
        drawn += torch.rand(2).tolist()
    assert (drawn, other) == (draw("draw", 1), draw("draw", 2))


class Noisy(nn.Module):
    """A parameter that is drawn, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        nn.init.normal_(self.weight)
        self.register_buffer("noise", torch.zeros(4))
        nn.init.normal_(self.noise)


def test_buffers_alone_are_drawn_where_parameters_are_read_afterwards() -> None:
    with Undrawn():
        layer = Noisy()
    assert torch.equal(layer.weight, torch.ones(4))
    assert layer.noise.all()


def test_layers_of_torch_draw_nothing_where_parameters_are_read_afterwards() -> None:
    before = torch.get_rng_state()
    with Undrawn():
        nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 6), nn.Conv1d(2, 2, 3))
    assert torch.equal(torch.get_rng_state(), before)
