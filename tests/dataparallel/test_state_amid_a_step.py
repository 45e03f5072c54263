"""What a rank keeps of itself where it is stopped amid a step: the state before that step."""

import torch
from support.layered import ADAM, RATE, Layered, one_step, with_replicas

from dpipe.dataparallel.base import DataParallel
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.sharded import Sharded
from dpipe.wire.feedback import wire
from dpipe.wire.transfer import Links


def sharded(stage: Layered, links: Links, replica: int) -> DataParallel:
    def exchange() -> DirectExchange:
        return DirectExchange(links, replica, range(2), wire("none"), part_bytes=40)

    return Sharded({0: stage}, ADAM, exchange(), exchange())


def test_gradients_of_the_step_under_way_are_not_kept() -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> None:
        stage.set_gradients(0, replica)
        one_step(kind, stage, 0)
        before = {name: moment.clone() for name, moment in kind.state().items()}
        stage.set_gradients(1, replica)
        kind.begin(1, RATE, 1.0)
        kind.start(0)
        kind.wait()
        amid = kind.state()
        assert amid.keys() == before.keys()
        for name, moment in before.items():
            assert torch.equal(amid[name], moment)

    with_replicas(sharded, 2, run)
