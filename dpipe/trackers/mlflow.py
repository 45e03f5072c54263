"""MLflow, with the extra `mlflow`: RUN/mlflow.db, or the server of MLFLOW_TRACKING_URI.

The client alone (mlflow-skinny): `mlflow ui` wants all of MLflow. Not files in folders, which
MLflow 3.17 refuses to write.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dpipe.trackers.tracker import TracedStep, TrackedRun

_EXPERIMENT = "dpipe"
_MOST_AT_ONCE = 100  # parameters in a request
_MAX_VALUE = 500  # characters, of every server


class MlflowTracker:
    """A run of MLflow."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        # Names of MLflow's have no ">", and those of links do: "mb_per_s/0->1".
        metrics = [
            Metric(key.replace("->", " to "), value, now_ms, step) for key, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def trace(self, steps: Sequence[TracedStep]) -> None:
        """Its traces are of calls of language models."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def build(run: TrackedRun) -> MlflowTracker:
    from mlflow import MlflowClient
    from mlflow.entities import Param

    folder = run.folder.resolve()
    uri = run.environment.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    client = MlflowClient(tracking_uri=uri)
    name = run.environment.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    run_id = client.create_run(experiment, run_name=folder.name).info.run_id
    params = [
        Param(f"{section}.{key}", str(value)[:_MAX_VALUE])
        for section, keys in run.config.items()
        for key, value in keys.items()
    ]
    for start in range(0, len(params), _MOST_AT_ONCE):
        client.log_batch(run_id, params=params[start : start + _MOST_AT_ONCE])
    return MlflowTracker(client, run_id)
