"""The trackers, each declared once. No torch, and none of their libraries.

        writes                          extra
wandb   RUN/wandb, or W&B's server      wandb
mlflow  RUN/mlflow.db, or a server      mlflow
otel    to a collector, by OTLP         otel
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from dpipe.choices import Choices
from dpipe.errors import ConfigError


@dataclass(frozen=True)
class TrackerKind:
    """`builder` is called with a `tracker.TrackedRun`, on the tracker's thread, and returns a
    `tracker.Tracker`.
    """

    name: str
    builder: str  # "package.module:function", imported when a run begins
    libraries: tuple[str, ...]  # modules that it needs
    extra: str  # of dpipe, that installs them


TRACKERS = Choices[TrackerKind](
    "run.trackers",
    TrackerKind(
        "wandb",
        builder="dpipe.trackers.wandb:build",
        libraries=("wandb",),
        extra="wandb",
    ),
    TrackerKind(
        "mlflow",
        builder="dpipe.trackers.mlflow:build",
        libraries=("mlflow", "sqlalchemy", "alembic"),
        extra="mlflow",
    ),
    TrackerKind(
        "otel",
        builder="dpipe.trackers.otel:build",
        libraries=("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"),
        extra="otel",
    ),
)


def refuse_missing(names: Iterable[str]) -> None:
    """Raises `ConfigError` for a tracker whose library is not installed. Only rank 0 and a
    coordinator ask: nobody else writes rows.
    """
    for name in names:
        kind = TRACKERS.named(name)
        if not all(map(_is_installed, kind.libraries)):
            raise ConfigError(
                f'run.trackers "{name}" needs its library: pip install dpipe[{kind.extra}], or '
                "leave it out"
            )


def _is_installed(module: str) -> bool:
    # Raised where a package around the module is missing.
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
