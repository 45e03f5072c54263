import subprocess
import sys

import pytest
import torch

from dpipe.stage.flops import gpt_layer_activation_bytes, gpt_layer_flops, gpt_layer_parameter_bytes
from dpipe.stage.gpt import gpt
from dpipe.stage.model import materialise
from dpipe.stage.probe import probe
from dpipe.wire.spec import TensorSpec

SIZES = {"vocab_size": 96, "num_layers": 2, "width": 64, "context": 32}
BATCH = 4
IDS = TensorSpec((BATCH, 32), torch.int64)
MODEL = gpt(**SIZES, num_heads=4, dropout=0.0, tied=False)


def test_formula_counts_what_torch_counts() -> None:
    counted = [cost.forward_flops for cost in probe(MODEL, TensorSpec((BATCH, 32), torch.int64), seed=0)]
    assert list(gpt_layer_flops(batch_size=BATCH, **SIZES)) == counted


@pytest.mark.parametrize("tied", [False, True])
def test_formula_counts_the_parameters(tied: bool) -> None:
    counted = [cost.parameter_bytes for cost in probe(gpt(**SIZES, num_heads=4, dropout=0.0, tied=tied), IDS, seed=0)]
    assert list(gpt_layer_parameter_bytes(**SIZES)) == counted


def test_formula_gives_the_bytes_that_autograd_keeps() -> None:
    expected = gpt_layer_activation_bytes(batch_size=BATCH, **SIZES)
    x = torch.zeros(BATCH, 32, dtype=torch.int64)
    for index, size in enumerate(expected):
        layer = materialise(MODEL, index, 0, "cpu")
        kept, x = bytes_kept(layer, x, MODEL.loss if index == 3 else None)
        # The formula leaves out means and deviations of the norms and the attention's normalisers.
        assert size == pytest.approx(kept, rel=0.1), f"layer {index}"


def bytes_kept(layer: torch.nn.Module, x: torch.Tensor, loss: object) -> tuple[int, torch.Tensor]:
    """Bytes of the distinct storages, parameters apart, that a layer's graph holds."""
    storages: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    leaf = x.detach().requires_grad_(x.is_floating_point())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(leaf)
        if callable(loss):
            loss(out, torch.zeros(out.shape[:2], dtype=torch.int64))
    for tensor in kept:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.shape != (32,):  # positions are the same in every micro-batch
            storages[storage.data_ptr()] = storage.nbytes()
    targets = 8 * x.shape[0] * x.shape[1] if callable(loss) else 0
    return sum(storages.values()) - targets, out.detach()


@pytest.mark.parametrize("module", ["flops", "partition"])
def test_module_needs_no_torch(module: str) -> None:
    code = f"import sys, dpipe.stage.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
