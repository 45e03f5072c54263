"""The commands that are run on a device, and its final state, with a fake `tc`. Real devices are in
test_lab.
"""

import signal

import pytest

from dpipe.errors import ProfileError
from dpipe.network.link import Interface, Link, Network
from netem import shell
from netem.apply import applied, apply, clear
from netem.shell import NetemError

SLOW = Network("slow", Link(50, 1))
UNEVEN = Network("uneven", Link(50, 1), links={(0, 1): Link(1, 1)})


class Kernel:
    """A device and its root qdisc, by `tc`'s words."""

    def __init__(self) -> None:
        self.root = '{"kind": "fq_codel", "handle": "0:", "root": true}'
        self.ran: list[str] = []
        self.refuses = "nothing"

    def run(self, argv: list[str]) -> str:
        words = " ".join(argv)
        if words == "tc -j qdisc show dev lo":
            return f"[{self.root}]"
        self.ran.append(words)
        if self.refuses in words:
            raise NetemError(f"refused: {words}")
        if "root handle d1be:" in words:
            self.root = '{"kind": "netem", "handle": "d1be:", "root": true}'
        if words == "tc qdisc del dev lo root":
            self.root = "{}"
        return ""


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(shell, "run", kernel.run)
    return kernel


def test_shaping_is_put_on(kernel):
    apply(SLOW, 0, "lo")
    assert kernel.ran == [
        "tc qdisc add dev lo root handle d1be: netem limit 12500 delay 50ms rate 1gbit"
    ]


def test_earlier_shaping_is_replaced(kernel):
    apply(SLOW, 0, "lo")
    apply(SLOW, 0, "lo")
    assert kernel.ran[1:] == ["tc qdisc del dev lo root", kernel.ran[0]]


def test_clear_removes_the_shaping_and_returns_whether_there_was_one(kernel):
    apply(SLOW, 0, "lo")
    assert clear("lo")
    assert not clear("lo")


def test_qdisc_that_is_not_ours_is_left_alone(kernel):
    kernel.root = '{"kind": "htb", "handle": "1:", "root": true}'
    with pytest.raises(NetemError, match=r"lo carries a qdisc that is not ours: htb 1:; remove it"):
        apply(SLOW, 0, "lo")
    assert kernel.ran == []


def test_command_that_fails_leaves_the_device_unshaped(kernel):
    kernel.refuses = "filter"
    with pytest.raises(NetemError, match="refused: tc filter"):
        apply(UNEVEN, 0, "lo", ["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    assert kernel.ran[-1] == "tc qdisc del dev lo root"


def test_device_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(NetemError, match=r"device 'eth9' does not exist; this machine has: lo"):
        apply(SLOW, 0, "eth9")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_wait_and_undoes_the_shaping(kernel, ending):
    with applied(SLOW, 0, "lo") as wait:
        signal.raise_signal(ending)  # blocked until `wait` takes it
        wait()
        assert "d1be:" in kernel.root
    assert kernel.root == "{}"


def test_error_in_the_block_undoes_the_shaping(kernel):
    with pytest.raises(ZeroDivisionError), applied(SLOW, 0, "lo"):
        raise ZeroDivisionError
    assert kernel.root == "{}"


def test_ingress_changes_nothing_where_it_is_refused(kernel):
    network = Network("n", Link(1, 1), interfaces=(Interface((0,), ingress_gbps=1),))
    with pytest.raises(ProfileError, match="node 0 of network 'n' has ingress_gbps"):
        apply(network, 0, "lo")
    assert kernel.ran == []
