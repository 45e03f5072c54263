from collections.abc import Iterator
from functools import partialmethod

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from dpipe.stage.bert import IGNORED, bert
from dpipe.stage.gpt import GptHead, gpt
from dpipe.stage.model import materialise
from dpipe.stage.stage import Stage, Tensors
from dpipe.stage.tensor_group import TensorGroup
from dpipe.stage.tensor_parallel import Shard, Split, split_cross_entropy

MODEL = {
    "vocab_size": 24,
    "num_layers": 2,
    "width": 16,
    "num_heads": 4,
    "context": 8,
    "tied": False,
}
MICROBATCHES, TOLERANCE = 2, 1e-5

Found = tuple[list[float], dict[str, torch.Tensor]]


def batches(name: str) -> Iterator[tuple[Tensors, torch.Tensor]]:
    """Inputs and targets of each micro-batch; BERT's sequences have different lengths."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(MICROBATCHES):
        tokens, types = (
            torch.randint(24, (3, 9), generator=draw),
            torch.randint(2, (3, 8), generator=draw),
        )
        if name == "gpt":
            yield (tokens[:, :-1],), tokens[:, 1:]
            continue
        masked = torch.where(torch.rand(3, 8, generator=draw) < 0.4, tokens[:, :-1], IGNORED)
        masked[:, 0] = torch.tensor([0, 1, 1])
        yield (tokens[:, :-1], types, torch.tensor([8, 5, 7], dtype=torch.int32)), masked


def trained(name: str, group: TensorGroup | None, dropout: float, **options: object) -> Found:
    """Losses and whole gradients of one step of a tiny model, on the ranks of `group`."""
    model = {"gpt": gpt, "bert": bert}[name](dropout=dropout, **MODEL)  # type: ignore[arg-type]
    layers = {index: materialise(model, index, 3, "cpu") for index in range(len(model.layers))}
    split = None if group is None else Split(group, layers)
    stage = Stage(
        0,
        layers,
        num_microbatches=MICROBATCHES,
        loss=model.loss_on(group),
        seed=3,
        split=split,
        **options,
    )  # type: ignore[arg-type]
    losses = []
    for m, (inputs, targets) in enumerate(batches(name)):
        (value,) = stage.forward(m, inputs, targets)
        losses.append(float(value))
    for m in range(MICROBATCHES):
        if "compiled" in options:
            stage.backward(m, ())
            continue
        stage.backward_input(m, ())
        stage.backward_weight(m)
    stage.complete()
    gradients = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    return losses, {n: g if split is None else split.whole(n, g) for n, g in gradients.items()}


@pytest.mark.parametrize(
    ("name", "size", "sequence", "recompute", "dropout"),
    [
        ("gpt", 2, False, "none", 0.1),
        ("gpt", 4, True, "full", 0.1),
        ("gpt", 2, True, "selective", 0.1),
        ("gpt", 2, False, "selective", 0.1),
        ("bert", 4, False, "full", 0.1),
        ("bert", 2, True, "none", 0.1),
        ("bert", 2, False, "selective", 0.3),
    ],
)
def test_tensor_parallel_ranks_have_the_gradients_of_one_process(
    name: str, size: int, sequence: bool, recompute: str, dropout: float
) -> None:
    """Including dropout: its masks are those of one process."""
    losses, gradients = trained(name, None, dropout, recompute=recompute)
    results = on_ranks(
        size, lambda group: trained(name, group, dropout, recompute=recompute), sequence=sequence
    )
    agree(results, losses, gradients)


@pytest.mark.alone  # both ranks trace in this process, under a lock of the compiler
@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore:The .grad attribute"
)  # warnings of torch's compiler
def test_compiled_tensor_parallel_ranks_have_the_gradients_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the last step, which compiles the traced code to machine code and takes minutes."""
    monkeypatch.setattr(
        torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager")
    )
    # Tracing restores the random state of the process at its end. Ranks are threads here, and one
    # would do so while another draws; a layer that may draw has the generator to itself.
    monkeypatch.setattr(GptHead, "draws", True)
    how = {"recompute": "selective"}
    losses, gradients = trained("gpt", None, 0.1, **how)
    results = on_ranks(
        2,
        lambda group: trained("gpt", group, 0.1, compiled=True, **how),
        sequence=True,
        timeout_s=60,
    )
    agree(results, losses, gradients)


def agree(results: list[Found], losses: list[float], gradients: dict[str, torch.Tensor]) -> None:
    for losses_of_rank, gradients_of_rank in results:
        assert losses_of_rank == pytest.approx(losses, rel=TOLERANCE)
        assert gradients_of_rank.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradients_of_rank[parameter], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("dim", "parts"), [(0, 1), (0, 3), (1, 1)])
def test_shards_join_to_the_whole_tensor(dim: int, parts: int) -> None:
    whole = torch.arange(48.0).view(12, 4)
    shard = Shard((12, 4), dim, parts, 2)
    assert torch.equal(shard.join([shard.take(whole, rank).flatten() for rank in range(2)]), whole)


def test_shard_of_queries_keys_and_values_has_some_of_each() -> None:
    """As drawn at `Shard`."""
    assert Shard((6,), 0, 3, 2).take(torch.arange(6), 1).tolist() == [1, 3, 5]


def test_split_sequence_keeps_only_its_own_positions_for_backward() -> None:
    """Inputs of column-parallel matrices are gathered again in backward: a rank keeps only 16 u / T
    of a block.
    """
    batch, context, width, size = 4, 64, 16, 4
    unit = batch * context * width * 4

    def kept_bytes(group: TensorGroup) -> int:
        model = gpt(
            vocab_size=24,
            num_layers=1,
            width=width,
            num_heads=4,
            context=context,
            dropout=0.0,
            tied=False,
        )
        layer = {1: materialise(model, 1, 3, "cpu")}
        stage = Stage(0, layer, num_microbatches=1, split=Split(group, layer))
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        parameters = sum(parameter.nbytes for parameter in stage.parameters())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stage.forward(0, (torch.ones(batch, context // size, width),))
        return sum(storages.values()) - parameters

    for num_bytes in on_ranks(size, kept_bytes, sequence=True):
        assert num_bytes <= 17 * unit // size


LOGITS = torch.randn(5, 12, generator=torch.Generator().manual_seed(2)) * 30


def cross_entropy_of_one_process(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = LOGITS.clone().requires_grad_()
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("targets", [[0, 3, 4, 8, 11], [-100, 3, -100, 8, 0]])
def test_loss_over_a_split_vocabulary_equals_the_whole(targets: list[int]) -> None:
    """Also if some targets are ignored, such as those of tokens that are not masked."""
    expected_words = torch.tensor(targets)

    def on_rank(group: TensorGroup) -> tuple[torch.Tensor, torch.Tensor]:
        part = group.part(LOGITS, -1).clone().requires_grad_()
        loss = split_cross_entropy(part, expected_words, group)
        loss.backward()
        assert part.grad is not None
        return loss.detach(), group.all_gather(part.grad, -1)

    loss, gradient = cross_entropy_of_one_process(expected_words)
    for loss_of_rank, gradient_of_rank in on_ranks(3, on_rank):
        torch.testing.assert_close(loss_of_rank, loss)
        torch.testing.assert_close(gradient_of_rank, gradient)
