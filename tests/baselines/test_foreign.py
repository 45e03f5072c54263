import pytest

from dpipe.baselines.foreign import check_world_size, refuse
from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.processes.environment import ProcessInfo


def test_refusal_lists_every_reason():
    with pytest.raises(ConfigError, match="^torch is run as it is: a must be b; e must be f$"):
        refuse("torch", {"a must be b": True, "c must be d": False, "e must be f": True})


def test_other_number_of_processes_than_configured_is_refused():
    config = build({"pipeline": {"stages": 2}, "data_parallel": {"replicas": 2, "kind": "sharded"}})
    with pytest.raises(
        ConfigError, match=r"3 processes were started, but pipeline.stages 2, .* need 4; start that"
    ):
        check_world_size(config, ProcessInfo(0, 3, 0, "127.0.0.1:7000"))
