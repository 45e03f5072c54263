import pytest

from dpipe.report.efficiency import PEAKS, gpt_train_flops, mfu, peak_of

XL = {"context": 2048, "width": 2048, "num_layers": 24, "vocab_size": 50_304}


def test_train_flops_are_those_of_palm() -> None:
    """6 N + 12 L H Q T a token, N without the embedding's table (Chowdhery et al. 2022, appendix
    B).
    """
    parameters = 12 * 24 * 2048**2 + 50_304 * 2048
    a_token = 6 * parameters + 12 * 24 * 2048 * 2048
    assert gpt_train_flops(num_sequences=3, **XL) == pytest.approx(a_token * 3 * 2048)


def test_train_flops_are_those_of_megatron_without_recomputation() -> None:
    """72 B s l h^2 (1 + s / 6h + V / 12 l h): Narayanan et al. 2021, with 3 passes where
    recomputation makes 4.
    """
    s, h, layers, vocabulary = 2048, 2048, 24, 50_304
    formula = 72 * 3 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    assert gpt_train_flops(num_sequences=3, **XL) == pytest.approx(formula)


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("Tesla V100-SXM2-16GB", 15.7),
        ("Tesla V100-PCIE-16GB", 14.0),
    ],
)
def test_peak_is_found_by_the_drivers_name(device: str, bf16: float) -> None:
    peak = peak_of(device)
    assert peak is not None
    assert peak.flops("bf16") == bf16 * 1e12


def test_peak_of_an_unknown_device_is_none() -> None:
    assert peak_of("GeForce GTX 1080") is None


def test_mfu_is_a_share_of_all_devices() -> None:
    (h200,) = [peak for peak in PEAKS if peak.name == "H200"]
    assert mfu(989.4e12, 2.0, h200, "bf16", num_devices=2) == pytest.approx(0.25)
