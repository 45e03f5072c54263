import sys

import pytest

from dpipe.choices import function_at
from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.transport.kinds import TRANSPORTS, TransportKind
from dpipe.transport.local import LocalTransport


@pytest.mark.parametrize("name", TRANSPORTS)
def test_kind_names_its_builder(name: str) -> None:
    assert callable(function_at(TRANSPORTS[name].make))


def test_kind_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in ("grpc", "tcp"):
        TRANSPORTS[name].check()
    with pytest.raises(ConfigError, match=r'pip install "dpipe\[cuda\]"'):
        TRANSPORTS["nccl"].check()


def test_kind_that_is_declared_elsewhere_is_configured_by_its_properties() -> None:
    fast = TransportKind(
        "fast", f"{LocalTransport.__module__}:{LocalTransport.__name__}", can_be_shaped=False
    )
    TRANSPORTS.add(fast)
    try:
        assert build({"transport": {"kind": "fast"}}).transport.kind == "fast"
        with pytest.raises(ConfigError, match='kind "fast" transport.shape must not be set'):
            build({"transport": {"kind": "fast", "shape": "slow.toml"}})
    finally:
        TRANSPORTS.remove("fast")
    with pytest.raises(ConfigError, match='transport.kind must be one of "grpc", "tcp", "nccl"'):
        build({"transport": {"kind": "fast"}})
