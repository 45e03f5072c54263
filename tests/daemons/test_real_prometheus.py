"""Debian's Prometheus scrapes a run while it trains, and answers what the dashboard asks.

    run, 2 ranks ──/metrics──┐
                             ├──▶ prometheus ◀── the queries of scripts/grafana/dpipe.json
    values of a GPU run ─────┘

scripts/apt-daemons installs it; `scripts/test -m daemon` runs this.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from support.daemons import needs, started, until

from dpipe.config.load import Config
from dpipe.processes.launch import free_port
from dpipe.report.prometheus import PrometheusPort

pytestmark = pytest.mark.daemon

DASHBOARD = Path(__file__).parents[2] / "scripts/grafana/dpipe.json"
OF_GPUS = {
    "mfu": 0.5,
    "gpu_memory_mb": {"0": 2.0},
    "gpu_use_percent": {"0": 50.0},
}
GPU_NAMES = {
    "dpipe_model_flops_utilization_ratio",
    "dpipe_gpu_memory_bytes",
    "dpipe_gpu_use_ratio",
}
CONFIGURATION = """
global: {{scrape_interval: 100ms, scrape_timeout: 100ms}}
scrape_configs:
  - job_name: dpipe
    static_configs: [{{targets: ["127.0.0.1:{run}", "127.0.0.1:{gpus}"]}}]
"""
Series = list[dict[str, Any]]


class Prometheus:
    def __init__(self, port: int) -> None:
        self.port = port

    def is_ready(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=10):
                return True
        except OSError:  # also a refusal that is answered, as URLError
            return False

    def ask(self, path: str, **query: str | float) -> Series:
        words = urlencode(query)
        address = f"127.0.0.1:{self.port}/api/v1/{path}?{words}"
        with urlopen(f"http://{address}", timeout=10) as answer:
            result = json.load(answer)["data"]["result"]
        assert isinstance(result, list)
        return result

    def value(self, query: str) -> float | None:
        series = self.ask("query", query=query)
        return float(series[0]["value"][1]) if series else None


@pytest.fixture
def gpus() -> Iterator[PrometheusPort]:
    """What rank 0 of a run on GPUs would serve: no GPU is here."""
    port = PrometheusPort("127.0.0.1", 0)
    port.take(OF_GPUS)
    yield port
    port.close()


@pytest.fixture
def run_port() -> int:
    return free_port()


@pytest.fixture
def prometheus(tmp_path: Path, run_port: int, gpus: PrometheusPort) -> Iterator[Prometheus]:
    needs("prometheus")
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(run=run_port, gpus=gpus.port))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={tmp_path / 'series'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = tmp_path / "prometheus.log"
    with started(command, log) as process:
        asked = Prometheus(port)
        until(lambda: asked.is_ready() or process.poll() is not None, "Prometheus is ready")
        assert process.poll() is None, log.read_text()
        yield asked


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_query_of_the_dashboard_has_data_of_a_run_that_is_scraped(
    prometheus: Prometheus,
    run_port: int,
    tiny: Callable[..., Config],
    losses: Callable[..., list[float]],
) -> None:
    run = f'instance="127.0.0.1:{run_port}"'
    scraped: list[float] = []

    def wait_for_a_scrape(row: dict[str, Any]) -> None:
        if "loss" not in row:
            return
        query = f"dpipe_steps_total{{{run}}}"
        until(
            lambda: (prometheus.value(query) or 0) >= row["step"] + 1,
            f"a scrape after step {row['step']}",
        )
        scraped.append(prometheus.value(f"dpipe_loss{{{run}}}") or 0)

    begin = time.time()
    config = tiny(
        train__steps=4,
        train__eval_every=1,
        pipeline__stages=2,
        node__metrics_port=run_port,
    )
    measured = losses(config, on_row=wait_for_a_scrape)
    assert scraped == pytest.approx(measured)

    for query in queries():
        # As Grafana asks for a panel.
        found = prometheus.ask("query_range", query=query, start=begin, end=time.time(), step=0.1)
        instances = {series["metric"]["instance"] for series in found}
        names = set(re.findall(r"dpipe_\w+", query))
        of_this_run = f"127.0.0.1:{run_port}" in instances
        assert instances, f"no data for {query}"
        assert of_this_run or names <= GPU_NAMES, f"no data of the run for {query}"
