import os
from typing import Any

import pytest

from dpipe.bench import processes


def test_processes_of_a_bench_get_the_settings_of_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called from a script, a bench timed gRPC's defaults, which move fewer bytes a second."""
    for name in ("GRPC_POLL_STRATEGY", "GRPC_EXPERIMENTS"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    inherited: list[dict[str, str]] = []

    def start(*args: Any, **options: Any) -> None:
        inherited.append(dict(os.environ))

    monkeypatch.setattr(processes, "start_processes", start)
    processes.run_processes(print, (), 2)
    assert inherited[0]["GRPC_POLL_STRATEGY"] == "poll"
