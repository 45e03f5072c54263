"""MLflow without a server: what is in RUN/mlflow.db."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpipe.config.load import Config

for needed in ("mlflow", "sqlalchemy", "alembic"):
    pytest.importorskip(needed, reason="needs pip install dpipe[mlflow]")


@pytest.mark.filterwarnings("default")  # its imports have some
def test_run_keeps_its_rows_and_its_configuration(
    tiny: Callable[..., Config],
    losses: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    measured = losses(tiny(run__trackers=("mlflow",), pipeline__stages=2))
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/run/mlflow.db")
    experiment = client.get_experiment_by_name("dpipe")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == [0, 1, 2]
    assert [metric.value for metric in history] == pytest.approx(measured)
    assert "mb_per_s/0 to 1" in run.data.metrics
    assert run.info.status == "FINISHED"
    assert run.data.params["pipeline.stages"] == "2"
    assert not any(key.startswith("node.") for key in run.data.params), "it holds tokens"
