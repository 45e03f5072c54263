import torch

from dpipe.bench import formats
from dpipe.bench.formats import measure_format, names_to_compare
from dpipe.report.pace import silent


def test_options_are_compared_with_the_formats_they_go_with() -> None:
    names = names_to_compare()
    assert {"none", "bf16", "int8", "int4", "int4+hadamard", "int8+feedback", "int4+delta"} < set(
        names
    )
    assert not {"int8+hadamard", "none+feedback"} & set(names)


def test_row_has_bits_errors_and_rates(monkeypatch) -> None:
    monkeypatch.setattr(formats, "_SHAPE", (1, 64, 1024))
    num_threads = torch.get_num_threads()
    plain = measure_format("int4", silent())
    rotated = measure_format("int4+hadamard", silent())
    assert plain["bits a value"] == rotated["bits a value"] == 4.5
    assert rotated["with outliers"] < 0.9 * plain["with outliers"]
    apart = measure_format("int4+outlier", silent())
    assert apart["bits a value"] == 4.875
    assert apart["with outliers"] < 0.3 * plain["with outliers"]
    assert plain["encode, GB/s"] > 0
    assert plain["decode, GB/s"] > 0
    assert torch.get_num_threads() == num_threads


def test_deltas_are_measured_of_a_sample_that_has_changed_since_its_last_visit(monkeypatch) -> None:
    monkeypatch.setattr(formats, "_SHAPE", (1, 64, 1024))
    plain = measure_format("int4", silent())
    deltas = measure_format("int4+delta", silent())
    assert deltas["bits a value"] == plain["bits a value"]
    assert 0.05 < deltas["error"] / plain["error"] < 0.2, "the change is a tenth of the values"
    assert deltas["with outliers"] < 0.2 * plain["with outliers"]
    assert deltas["round trip, GB/s"] > 0
