"""How much of a device's arithmetic a training step uses: model FLOPs utilisation (MFU). No torch.

    MFU = model FLOPs of a step / (seconds * peak FLOP/s of all devices)

Model FLOPs are those of the mathematics, forward and backward: 3 times the forward pass of
`flops.gpt_layer_flops`. Recomputation does not count, as in PaLM. That is 6 N + 12 L H Q T a token,
with N parameters outside the embedding table and H Q the width (Chowdhery et al. 2022, PaLM,
appendix B). Without recomputation it is the formula of Narayanan et al. 2021 (Megatron-LM, section
5.1).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dpipe.stage.flops import gpt_layer_flops

_BACKWARD_AND_FORWARD = 3  # backward of a product is two products of its size


@dataclass(frozen=True)
class Peak:
    """Dense (not sparse) TFLOP/s of one device, by precision; fp32 is without TF32, as in torch."""

    name: str
    fp32: float
    fp16: float
    bf16: float

    def flops(self, precision: str) -> float:
        return 1e12 * {"fp32": self.fp32, "fp16": self.fp16, "bf16": self.bf16}[precision]


# From NVIDIA's data sheets: V100 (2020), A100 (2021), H100 (2023), H200 (2024). Those for Hopper
# give figures with sparsity, twice the dense ones. A V100 has no bf16 units: it computes as in
# fp32. The first name that fits counts, so longer names come first.
PEAKS = (
    Peak("V100-PCIE", 14.0, 112.0, 14.0),
    Peak("V100", 15.7, 125.0, 15.7),
    Peak("A100", 19.5, 312.0, 312.0),
    Peak("H100 PCIe", 51.0, 756.0, 756.0),
    Peak("H100 NVL", 60.0, 835.5, 835.5),
    Peak("H100", 67.0, 989.4, 989.4),
    Peak("H200 NVL", 60.0, 835.5, 835.5),
    Peak("H200", 67.0, 989.4, 989.4),
)


def peak_of(device_name: str) -> Peak | None:
    """The peak of the device that its driver calls `device_name`, such as "NVIDIA A100-SXM4-40GB".

    None if it is not in the table, or a slice of one (MIG).
    """
    # A slice has some of the device's units: its peak is another.
    if " MIG " in device_name:
        return None
    for peak in PEAKS:
        if peak.name.lower() in device_name.lower():
            return peak
    return None


def gpt_train_flops(
    *, num_sequences: int, context: int, width: int, num_layers: int, vocab_size: int
) -> float:
    """Model FLOPs of a training step over `num_sequences` sequences."""
    forward = gpt_layer_flops(
        batch_size=num_sequences,
        context=context,
        width=width,
        num_layers=num_layers,
        vocab_size=vocab_size,
    )
    return train_flops(forward)


def train_flops(forward: Iterable[float]) -> float:
    """Model FLOPs of a step, given those of each layer's forward pass."""
    return _BACKWARD_AND_FORWARD * sum(forward)


def mfu(
    step_flops: float, seconds: float, peak: Peak, precision: str, num_devices: int = 1
) -> float:
    """The fraction of what `num_devices` could have done in that time."""
    return step_flops / (seconds * peak.flops(precision) * num_devices)
