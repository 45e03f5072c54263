import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from dpipe.stage.tensor_group import TensorGroup
from dpipe.stage.vocabulary import split_cross_entropy

LOGITS = torch.randn(5, 12, generator=torch.Generator().manual_seed(2)) * 30


def of_one(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = LOGITS.clone().requires_grad_()
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("targets", [[0, 3, 4, 8, 11], [-100, 3, -100, 8, 0]])
def test_loss_over_parts_of_the_words_is_that_over_all(targets: list[int]) -> None:
    """Also where some targets are ignored, as those of words that are not masked."""
    asked = torch.tensor(targets)

    def on_rank(group: TensorGroup) -> tuple[torch.Tensor, torch.Tensor]:
        mine = group.part(LOGITS, -1).clone().requires_grad_()
        loss = split_cross_entropy(mine, asked, group)
        loss.backward()
        assert mine.grad is not None
        return loss.detach(), group.all_gather(mine.grad, -1)

    loss, gradient = of_one(asked)
    for got_loss, got in on_ranks(3, on_rank):
        torch.testing.assert_close(got_loss, loss)
        torch.testing.assert_close(got, gradient)
