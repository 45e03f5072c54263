import torch

from dpipe.wire.spec import TensorSpec


def test_spec_describes_a_tensor() -> None:
    spec = TensorSpec.of(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert str(spec) == "bfloat16[2, 3]"
    assert spec.num_bytes == 12
    assert TensorSpec.of(spec.empty()) == spec
