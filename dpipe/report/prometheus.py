"""Rank 0's metrics for Prometheus: `node.metrics_port`, with the extra `prometheus`.

    rows of metrics.jsonl ──▶ PrometheusPort ──GET /metrics──▶ Prometheus ──▶ Grafana

A row of every `run.log_every`-th step is what a scrape finds. Names and units are by
https://prometheus.io/docs/practices/naming: base units, `_total` for what only grows. NAMES has
them all; `scripts/grafana/dpipe.json` asks for no other.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from dpipe.errors import ConfigError, JoinError

_JOIN_S = 5.0
_MEGA = 1e6


@dataclass(frozen=True)
class Exported:
    """A number of a row: by what name it is exported, and times what."""

    key: str  # in a row
    name: str
    help: str
    factor: float = 1.0


SINGLE = (
    Exported("loss", "dpipe_loss", "Training loss of the last step, in nats a token."),
    Exported("held_out_loss", "dpipe_held_out_loss", "Last held-out loss, in nats a token."),
    Exported("learning_rate", "dpipe_learning_rate", "Learning rate of the last step."),
    Exported("grad_norm", "dpipe_gradient_norm", "Norm of the last gradient, before clipping."),
    Exported("step_s", "dpipe_step_duration_seconds", "Time of the last step."),
    Exported("tokens_per_s", "dpipe_tokens_per_second", "Tokens trained a second."),
    Exported("bubble", "dpipe_bubble_ratio", "Share of the step in which a rank does not compute."),
    Exported("mfu", "dpipe_model_flops_utilization_ratio", "Share of the GPUs' peak that is used."),
)
BY_RANK = (
    Exported("memory_mb", "dpipe_memory_bytes", "Peak memory of a rank's process.", _MEGA),
    Exported("optimizer_mb", "dpipe_optimizer_bytes", "A rank's optimizer state.", _MEGA),
    Exported("gpu_memory_mb", "dpipe_gpu_memory_bytes", "Peak memory of a rank's GPU.", _MEGA),
    Exported("gpu_use_percent", "dpipe_gpu_use_ratio", "How busy a rank's GPU is.", 0.01),
)
RATE = Exported(
    "mb_per_s", "dpipe_link_sent_bytes_per_second", "What a link carried in the last step.", _MEGA
)
STEPS = "dpipe_steps_total"  # which a resumed run may lower, as any counter's restart
NAMES = (STEPS, RATE.name, *(each.name for each in (*SINGLE, *BY_RANK)))


class PrometheusPort:
    """Serves the newest row on `host:port` until `close`. `port` 0 takes any free one.

    Raises `ConfigError` without the extra, `JoinError` where it cannot listen.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError:
            raise ConfigError(
                "node.metrics_port needs prometheus_client: pip install 'dpipe[prometheus]', or "
                "leave it out"
            ) from None
        self._lock = Lock()  # guards the row, which scrapes read on threads of their own
        self._row: dict[str, Any] = {}
        self._steps_done = 0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise JoinError(
                f"node.metrics_port {port} cannot be listened on at {host} ({error.strerror}); set "
                "another, or 0 for any free port"
            ) from None
        self.port = int(self._server.server_port)

    def take(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl. What it does not have stays as it was."""
        # A row of a held-out loss alone has the number of the step that comes next.
        is_done = "loss" in row
        with self._lock:
            self._row.update(row)
            self._steps_done = row.get("step", 0) + is_done

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)

    def collect(self) -> Iterator[Any]:
        """What a scrape gets."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            row = dict(self._row)
            steps_done = self._steps_done
        steps = CounterMetricFamily(STEPS, "Steps that are done.")
        steps.add_metric([], steps_done)
        yield steps
        for each in SINGLE:
            if isinstance(row.get(each.key), int | float):
                yield GaugeMetricFamily(each.name, each.help, row[each.key] * each.factor)
        for each in BY_RANK:
            yield _family(GaugeMetricFamily, each, row, ["rank"], lambda rank: [rank])
        yield _family(GaugeMetricFamily, RATE, row, ["from", "to"], lambda link: link.split("->"))


def _family(
    kind: Any,
    exported: Exported,
    row: Mapping[str, Any],
    labels: list[str],
    values_of: Callable[[str], list[str]],
) -> Any:
    family = kind(exported.name, exported.help, labels=labels)
    for key, value in row.get(exported.key, {}).items():
        family.add_metric(values_of(key), value * exported.factor)
    return family
