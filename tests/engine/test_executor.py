"""The executor on stages that only add and multiply, so that the expected results can be written
down.
"""

import math
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from dpipe.data.batch import Batch
from dpipe.dataparallel.single import Single
from dpipe.engine.executor import Executor, Parts, StepResult
from dpipe.engine.hop_codecs import HopCodecs
from dpipe.engine.recorder import Recorder
from dpipe.errors import PeerLost
from dpipe.schedule.action import Op
from dpipe.schedule.generate import forward_only, generate
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.span import Lane
from dpipe.transport.local import LocalHub
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec

M = 4
AS_IS = HopCodecs(HopFormats.alike("none", 9))
NUMBER = TensorSpec((1,), torch.float32)


@dataclass
class Doubling:
    """Doubles its input, and the gradient on the way back. Records its calls in order."""

    last: bool = False
    calls: list[str] = field(default_factory=list)
    held: int = 0

    def forward(
        self, m: int, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        self.calls.append(f"F{m}")
        self.held += 1
        return (inputs[0] * 2,) if not self.last else ((inputs[0] * 2).sum(),)

    def evaluate(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        return (inputs[0] * 2,) if not self.last else ((inputs[0] * 2).sum(),)

    def backward(self, m: int, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        given = self.backward_input(m, grads)
        self.backward_weight(m)
        return given

    def backward_input(self, m: int, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        gradient = grads[0] if grads else torch.ones(1)
        self.calls.append(f"I{m}:{gradient.item():g}")
        return (gradient * 2,)

    def backward_weight(self, m: int) -> None:
        self.calls.append(f"W{m}")
        self.held -= 1

    def parameters(self) -> list[nn.Parameter]:
        return []

    def complete(self) -> None:
        self.calls.append("complete")

    def clear(self) -> None:
        self.held = 0


class Breaking(Doubling):
    def forward(
        self, m: int, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        if m == 2:
            raise ArithmeticError("no more")
        return super().forward(m, inputs, targets)


def run_ranks(
    schedule: Schedule,
    stages: list[Doubling],
    tied: dict[int, nn.Parameter] | None = None,
) -> list[StepResult | BaseException]:
    """Run every rank in a thread; returns what each returned or raised."""
    hub = LocalHub(schedule.num_ranks, transfer_timeout_s=10)
    results: list[Any] = [None] * schedule.num_ranks

    def rank_main(rank: int) -> None:
        here = {s: stages[s] for s, owner in enumerate(schedule.rank_of_stage) if owner == rank}
        weights = {s: w for s, w in (tied or {}).items() if s in here}
        boundaries = [(NUMBER,)] * (schedule.num_stages - 1)
        parts = Parts(
            rank,
            here,
            hub.transport(rank),
            AS_IS,
            boundaries,
            Single(),
            Recorder(rank),
            weights,
        )
        batch = Batch([(torch.tensor([m + 1.0]),) for m in range(M)])
        try:
            results[rank] = Executor(parts).run(schedule, batch)
        except BaseException as error:
            results[rank] = error

    threads = [
        threading.Thread(target=rank_main, args=(rank,)) for rank in range(schedule.num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def losses_of(results: list[StepResult | BaseException]) -> list[float | None]:
    return [result.loss if isinstance(result, StepResult) else math.nan for result in results]


def doublings(num_stages: int) -> list[Doubling]:
    return [Doubling(last=stage == num_stages - 1) for stage in range(num_stages)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_every_schedule_computes_the_same(name: str, num_stages: int) -> None:
    stages = doublings(num_stages)
    losses = losses_of(run_ranks(lower(generate(name, num_stages, M)), stages))
    # the mean of 1 2 3 4, doubled by each stage; the other ranks do not know it
    assert losses == [None] * (num_stages - 1) + [2.5 * 2**num_stages]
    # the first stage's output gradient has been doubled by all the others
    assert [c for c in stages[0].calls if c[0] == "I"] == [
        f"I{m}:{2 ** (num_stages - 1)}" for m in range(M)
    ]


def test_interleaved_stages_pass_through_each_rank_twice() -> None:
    results = run_ranks(lower(generate("interleaved", 4, M, stages_per_rank=2)), doublings(4))
    assert losses_of(results) == [None, 2.5 * 2**4]


def test_stages_on_one_rank_need_no_link() -> None:
    (result,) = run_ranks(lower(generate("gpipe", 2, M, stages_per_rank=2)), doublings(2))
    assert isinstance(result, StepResult)
    assert (result.loss, result.sent_bytes) == (10.0, {})


def test_evaluation_runs_forward_alone() -> None:
    stages = doublings(2)
    results = run_ranks(lower(forward_only(2, M), step=False), stages)
    assert losses_of(results) == [None, 10.0]
    assert stages[0].calls == []


def test_program_is_run_up_to_its_vote() -> None:
    """At the vote gradients are complete and nothing permanent has changed: the caller votes and
    steps.
    """
    stages = doublings(2)
    schedule = lower(generate("gpipe", 2, M, stages_per_rank=2))
    (result,) = run_ranks(schedule, stages)
    assert [stage.calls[-1] for stage in stages] == ["complete", "complete"]
    assert isinstance(result, StepResult)
    assert {span.action.op for span in result.spans} == {Op.F, Op.B}
    assert [str(action) for action in schedule.vote_and_steps(0)] == ["0VOTE", "0STEP", "1STEP"]


def test_tied_gradients_are_exchanged_and_added() -> None:
    weights = {0: nn.Parameter(torch.zeros(1)), 2: nn.Parameter(torch.zeros(1))}
    weights[0].grad, weights[2].grad = torch.tensor([1.0]), torch.tensor([10.0])
    run_ranks(lower(generate("1f1b", 3, M), tied=True), doublings(3), weights)
    assert [weights[end].grad.item() for end in (0, 2)] == [11.0, 11.0]


@pytest.mark.parametrize("reduce", [False, True])
def test_tied_gradients_within_a_rank_are_added_once(reduce: bool) -> None:
    first, last = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, last.grad = torch.tensor([1.0]), torch.tensor([10.0])
    schedule = lower(generate("gpipe", 2, M, stages_per_rank=2), tied=True, reduce=reduce)
    stages = dict(enumerate(doublings(2)))
    transport = LocalHub(1).transport(0)
    single = Single()
    single.start = lambda stage: started.append((stage, first.grad.item(), last.grad.item()))
    started: list[tuple[int, float, float]] = []
    parts = Parts(
        *(
            0,
            stages,
            transport,
            AS_IS,
            [(NUMBER,)],
            single,
            Recorder(0),
        ),
        tied_here=(first, last),
    )
    Executor(parts).run(schedule, Batch([(torch.ones(1),)] * M))
    assert (first.grad.item(), last.grad.item()) == (11.0, 11.0)
    assert started == ([(0, 11.0, 11.0), (1, 11.0, 11.0)] if reduce else [])


def test_failure_carries_the_grid_with_the_culprit_marked() -> None:
    results = run_ranks(lower(generate("gpipe", 2, M)), [Breaking(), Doubling(last=True)])
    assert isinstance(results[0], ArithmeticError)
    (note,) = results[0].__notes__
    assert note.startswith("rank 0 was at 0F2:\n")
    assert "0F2" in note.split("\n", 1)[1]


def test_grid_of_a_failed_replica_has_the_ranks_of_the_run() -> None:
    alone, hub, boundaries = {0: Breaking(last=True)}, LocalHub(1, transfer_timeout_s=10), ()
    parts = Parts(
        0,
        alone,
        hub.transport(0),
        AS_IS,
        boundaries,
        Single(),
        Recorder(2),
        pp_group=(2,),
    )
    batch = Batch([(torch.tensor([m + 1.0]),) for m in range(M)])
    with pytest.raises(ArithmeticError) as failure:
        Executor(parts).run(lower(generate("gpipe", 1, M)), batch)
    (note,) = failure.value.__notes__
    assert [line.partition(" |")[0] for line in note.split("\n")] == [
        "rank 2 was at 0F2:",
        "rank 2",
    ]


def test_neighbour_of_a_failure_loses_its_peer_at_once() -> None:
    results = run_ranks(lower(generate("gpipe", 2, M)), [Breaking(), Doubling(last=True)])
    assert isinstance(results[1], PeerLost)


def test_aborted_step_can_be_cleared() -> None:
    stage = Breaking(last=True)
    parts = Parts(
        0,
        {0: stage},
        LocalHub(1).transport(0),
        AS_IS,
        (),
        Single(),
        Recorder(0),
    )
    with pytest.raises(ArithmeticError):
        Executor(parts).run(lower(generate("gpipe", 1, M)), Batch([(torch.ones(1),)] * M))
    Executor(parts).clear()
    assert stage.held == 0


def test_lanes_are_recorded_apart() -> None:
    _, result = run_ranks(lower(generate("1f1b", 2, M)), doublings(2))
    assert isinstance(result, StepResult)
    count = Counter(span.lane for span in result.spans)
    assert count == {Lane.COMPUTE: 2 * M, Lane.SEND: M, Lane.RECV: M, Lane.WAIT: M}


def test_sent_bytes_are_counted_by_peer() -> None:
    results = run_ranks(lower(generate("1f1b", 2, M)), doublings(2))
    sent = [result.sent_bytes for result in results if isinstance(result, StepResult)]
    assert sent == [{1: 4 * M}, {0: 4 * M}]


def test_failure_of_the_caller_closes_the_links() -> None:
    failed: list[Exception] = []
    transport = LocalHub(1).transport(0)
    transport.fail = failed.append  # type: ignore[method-assign]
    parts = Parts(
        0,
        {0: Doubling(last=True)},
        transport,
        AS_IS,
        (),
        Single(),
        Recorder(0),
    )
    schedule = lower(generate("gpipe", 1, M))
    vote = schedule.vote_and_steps(0)[0]
    with pytest.raises(ArithmeticError) as failure, Executor(parts).doing(vote, schedule):
        raise ArithmeticError("no majority")
    assert failure.value.__notes__[0].startswith("rank 0 was at 0VOTE:\n")
    assert failed == [failure.value]


class Lingering:
    """A link whose messages leave when somebody waits for them, or at the third poll."""

    rank = 1

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> "LingeringSend":
        return LingeringSend(self.log, tag)

    def recv(self, like: TensorSpec, peer: int, tag: str) -> "LingeringSend":
        return LingeringSend([], tag)

    def fail(self, error: Exception) -> None:
        raise AssertionError from error


class LingeringSend:
    moved = None

    def __init__(self, log: list[str], tag: str) -> None:
        self.log, self.tag, self.left, self.looks = log, tag, False, 0

    def wait(self) -> torch.Tensor:
        self.settle()
        return torch.tensor([1.0])

    def settle(self) -> None:
        if not self.left:
            self.log.append(self.tag)
        self.left = True

    def done(self) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.settle()
        return self.left


class Agreeing(Single):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def start(self, stage: int) -> None:
        self.log.append(f"start {stage}")

    def wait(self) -> None:
        self.log.append("wait")


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [
        (generate("gpipe", 2, 1), (1,), ["1SEND_B0", "start 1", "wait"]),
        # Rank 1 goes on with stage 1 while the gradient of stage 3 is held back.
        (
            generate("gpipe", 4, 1, stages_per_rank=2),
            (1, 3),
            ["1SEND_F0", "3SEND_B0", "start 3", "1SEND_B0", "start 1"],
        ),
    ],
)
def test_exchange_begins_when_earlier_sends_have_left(
    schedule: Schedule, stages: tuple[int, ...], expected: list[str]
) -> None:
    log: list[str] = []
    lowered = lower(schedule, reduce=True)
    here = {stage: Doubling(last=stage == schedule.num_stages - 1) for stage in stages}
    boundaries = [(NUMBER,)] * (schedule.num_stages - 1)
    parts = Parts(
        1,
        here,
        Lingering(log),
        AS_IS,
        boundaries,
        Agreeing(log),
        Recorder(1),
    )
    Executor(parts).run(lowered, Batch())
    assert log[: len(expected)] == expected
