"""A worker with the token that describes an impossible stage to a parameter server."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.bounds import quickly

from dpipe.errors import TransferError
from dpipe.paramserver.server import ParameterServer
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramworker.client import ServerAccess, StageClient

RULE = StepRule(ranks=(0,), weight_decay=0.1, betas=(0.9, 0.95))


@pytest.fixture
def serving() -> Iterator[ParameterServer]:
    server = ParameterServer()
    yield server
    server.close()


def attend(serving: ParameterServer, spec: FlatSpec, rule: StepRule = RULE) -> None:
    access = ServerAccess(
        f"127.0.0.1:{serving.port}",
        replica=0,
        rank=0,
        session="run 1",
        connect_s=5.0,
        timeout_s=10.0,
    )
    client = StageClient(access, 0, spec, rule)
    try:
        client.open(0, 0, lambda: dict.fromkeys(("values", "exp_avg", "exp_avg_sq"), torch.ones(1)))
    finally:
        client.close()


def test_stage_with_a_true_description_is_accepted(serving: ParameterServer) -> None:
    attend(serving, FlatSpec((ParameterSpec("layers.0.w", 0, 1, True),), 16))
    assert serving.standing == {0: 0}


@pytest.mark.parametrize(
    ("num_values", "chunk_values", "words"),
    [
        (10**14, 10**9, r"stage 0 takes 2,400,000.0 GB here, .* this machine has"),
        (2**53, 2**40, "GB here"),
        (2**53 + 1, 2**40, "num_values"),
        (10**30, 2**40, "num_values"),
        (-1, 16, "num_values"),
        (10**7, 1, "in 10000000 chunks"),
        (1, 0, "chunk_values"),
        (1, 10**30, "chunk_values"),
    ],
)
def test_stage_that_no_machine_holds_is_refused_before_any_of_it_is_held(
    serving: ParameterServer, num_values: int, chunk_values: int, words: str
) -> None:
    spec = FlatSpec((ParameterSpec("layers.0.w", 0, num_values, True),), chunk_values)
    with quickly(), pytest.raises(TransferError, match=words):
        attend(serving, spec)
    assert serving.standing == {}


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": (-1,)},
        {"weight_decay": float("nan")},
        {"betas": (0.9, float("inf"))},
        {"wire": "\x1b[2J"},
        {"staleness": -1},
        {"staleness": 10**30},
    ],
    ids=str,
)
def test_rule_that_no_run_has_is_refused(serving: ParameterServer, change: dict[str, Any]) -> None:
    rule = StepRule(**{"ranks": (0,), "weight_decay": 0.1, "betas": (0.9, 0.95), **change})
    with pytest.raises(TransferError, match="description of its stage cannot be read") as caught:
        attend(serving, FlatSpec((ParameterSpec("layers.0.w", 0, 1, True),), 16), rule)
    assert str(caught.value).isprintable()
