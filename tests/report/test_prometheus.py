"""What Prometheus finds at node.metrics_port, and what the dashboard asks it for."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from dpipe.config.load import Config
from dpipe.errors import JoinError

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from dpipe.report.prometheus import NAMES, PrometheusPort  # noqa: E402

DASHBOARD = Path(__file__).parents[2] / "scripts/grafana/dpipe.json"
ROW = {
    "step": 6,
    "loss": 2.5,
    "learning_rate": 1e-3,
    "grad_norm": 1.0,
    "step_s": 0.5,
    "tokens_per_s": 100.0,
    "bubble": 0.25,
    "mfu": 0.5,
    "mb_per_s": {"0->1": 10.0},
    "memory_mb": {"0": 100.0, "1": 200.0},
    "optimizer_mb": {"0": 1.0},
    "gpu_memory_mb": {"0": 2.0},
    "gpu_use_percent": {"0": 50.0},
}
Scraped = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture
def port() -> Iterator[PrometheusPort]:
    port = PrometheusPort("127.0.0.1", 0)
    yield port
    port.close()


def scrape(port: int) -> Scraped:
    """As Prometheus does it: by name and values of labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: Scraped = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            found[sample.name, tuple(sample.labels.values())] = sample.value
    return found


def test_scrape_finds_the_newest_row_in_base_units(port: PrometheusPort) -> None:
    port.take({"step": 6, "held_out_loss": 3.0})
    port.take(ROW)
    found = scrape(port.port)
    assert found["dpipe_steps_total", ()] == 7
    assert found["dpipe_held_out_loss", ()] == 3.0, "it is of an earlier row"
    assert found["dpipe_memory_bytes", ("1",)] == 200e6
    assert found["dpipe_link_sent_bytes_per_second", ("0", "1")] == 10e6
    assert found["dpipe_gpu_use_ratio", ("0",)] == 0.5
    assert {name for name, _ in found} == set(NAMES)


def test_held_out_loss_before_a_step_does_not_count_the_step(port: PrometheusPort) -> None:
    """It counted."""
    port.take({"step": 0, "held_out_loss": 3.0})
    assert scrape(port.port)["dpipe_steps_total", ()] == 0


def test_before_the_first_row_no_step_is_done(port: PrometheusPort) -> None:
    assert scrape(port.port) == {("dpipe_steps_total", ()): 0}


def test_port_that_is_taken_is_refused(port: PrometheusPort) -> None:
    with pytest.raises(JoinError, match=f"node.metrics_port {port.port} cannot be listened on"):
        PrometheusPort("127.0.0.1", port.port)


def test_run_is_scraped_while_it_trains(
    tiny: Callable[..., Config],
    losses: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[PrometheusPort] = []
    scraped: list[Scraped] = []

    class Watched(PrometheusPort):
        def take(self, row: Any) -> None:
            super().take(row)
            made.append(self)
            scraped.append(scrape(self.port))

    monkeypatch.setattr("dpipe.run.build.PrometheusPort", Watched)
    config = tiny(train__steps=2, pipeline__stages=1, node__metrics_port=0)
    measured = losses(config)
    assert [each["dpipe_loss", ()] for each in scraped if ("dpipe_loss", ()) in each][-1] == (
        pytest.approx(measured[-1])
    )
    with pytest.raises(OSError, match="refused"):
        scrape(made[0].port)


def test_dashboard_asks_for_what_is_exported() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"dpipe_\w+", query)}
    assert asked == set(NAMES)
