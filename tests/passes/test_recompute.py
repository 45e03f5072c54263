import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpipe.passes.recompute import attention_cores, recompute_attention
from dpipe.passes.seeding import seeded
from dpipe.stage.gpt import AttentionCore, gpt
from dpipe.stage.model import LayeredModel, materialise
from dpipe.stage.stage import Stage

B, T, D, N = 2, 16, 8, 2
MODEL = gpt(vocab_size=11, num_layers=1, width=D, num_heads=N, context=T, dropout=0.2, tied=False)


def kept_bytes(model: LayeredModel, layer: int, recompute: str) -> int:
    """Bytes of the distinct storages that the graph of one layer holds after a forward pass."""
    bytes_of_storage: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        bytes_of_storage[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    stage = Stage(
        0, {layer: materialise(model, layer, 0, "cpu")}, num_microbatches=1, recompute=recompute
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.forward(0, (torch.ones(B, T, D),))
    return sum(bytes_of_storage.values())


def test_selective_recomputation_keeps_no_matrix_of_scores() -> None:
    """Softmax, dropout noise and their product on a CPU: three matrices [B, N, T, T] of floats."""
    saved = kept_bytes(MODEL, 1, "none") - kept_bytes(MODEL, 1, "selective")
    assert saved >= 3 * B * N * T * T * 4


def test_core_runs_again_once_in_backward_and_once_in_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, runs, real = materialise(MODEL, 1, 0, "cpu"), [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *qkv, **how: (runs.append(1), real(*qkv, **how))[1],
    )
    recompute_attention(layer)
    recompute_attention(layer)  # calling it twice changes nothing
    output = layer(torch.ones(B, T, D, requires_grad=True))
    assert len(runs) == 1
    output.sum().backward()
    assert len(runs) == 2
    with torch.no_grad():
        layer(torch.ones(B, T, D))
    assert len(runs) == 3


def test_recomputed_core_does_not_change_other_threads_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's checkpoint changes the generator of the whole process meanwhile."""
    layer, real, drawn = (
        materialise(MODEL, 1, 0, "cpu"),
        F.scaled_dot_product_attention,
        list[float](),
    )
    inside, running, has_drawn = threading.Event(), threading.Event(), threading.Event()

    def shown(*qkv: torch.Tensor, **how: object) -> torch.Tensor:
        running.set()
        has_drawn.wait(0.3)
        return real(*qkv, **how)  # type: ignore[arg-type]

    def other() -> None:
        with seeded("draw", 2):
            drawn.extend(torch.rand(1).tolist())
            inside.set()
            running.wait(0.3)
            drawn.extend(torch.rand(2).tolist())
            has_drawn.set()

    recompute_attention(layer)
    with seeded("draw", 1):
        output = layer(torch.ones(B, T, D, requires_grad=True))
    monkeypatch.setattr(F, "scaled_dot_product_attention", shown)
    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    output.sum().backward()
    thread.join(10)
    with seeded("draw", 2):
        assert drawn == [*torch.rand(1).tolist(), *torch.rand(2).tolist()]


def test_cores_are_found_by_their_mark() -> None:
    class Mine(nn.Module):
        attention_core = True

    layer = nn.Sequential(nn.Linear(2, 2), Mine(), AttentionCore(0.0, causal=True))
    assert attention_cores(layer) == [layer[1], layer[2]]
