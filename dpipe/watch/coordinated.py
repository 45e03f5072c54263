"""`CoordinatedRun`: the picture of an elastic run, of whose files none is here: what its
coordinator answers to `dpipe status`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dpipe.agent.inquiry import AgentStatus, RunStatus, status
from dpipe.errors import JoinError
from dpipe.watch.folder import event_view
from dpipe.watch.network_map import link_views
from dpipe.watch.picture import Picture, SeatView
from dpipe.watch.points import RunPoints, by_name
from dpipe.wire.rpc import Security

_ANSWER_S = 5.0
_ANSWERS = 50  # in one look: the first has many rows to fetch
_STATES = {
    "waiting": "waiting",
    "running": "training",
    "ending": "training",
    "over": "finished",
}
Ask = Callable[[int], RunStatus]  # with the step from which rows are wanted


class CoordinatedRun:
    """See `broadcast.PictureSource`. Where nobody answers, the last picture stays."""

    def __init__(self, address: str, security: Security, ask: Ask | None = None) -> None:
        self.points = RunPoints()
        self._address = address
        self._ask = ask or partial(_asked, address, security)
        self._epoch: int | None = None
        self._seen: set[str] = set()  # rows of the newest step, which are asked for again
        self._last = Picture(name=address, state="waiting")

    @property
    def is_preparing(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open between two questions."""

    def poll(self) -> Picture:
        try:
            answer = self._with_rows()
        except JoinError as error:
            return replace(self._last, state="unreachable", detail=str(error), eta_s=None)
        self._last = self._picture(answer)
        return self._last

    def _with_rows(self) -> RunStatus:
        for _ in range(_ANSWERS):
            answer = self._ask(self._next_step)
            # Another epoch makes some of the steps again, and their rows anew.
            if answer.epoch != self._epoch:
                self._epoch = answer.epoch
                self.points.clear()
                self._seen.clear()
                answer = self._ask(0)
            # An answer has a part of the rows where there are many.
            if not self._take(answer.rows):
                break
        return answer

    @property
    def _next_step(self) -> int:
        return self.points.points[-1].step if self.points.points else 0

    def _take(self, rows: list[str]) -> bool:
        """Whether any of them is new."""
        newest = self._next_step
        fresh = [row for row in rows if row not in self._seen]
        for row in fresh:
            self.points.add_line(row.encode())
        if self._next_step > newest:
            self._seen.clear()
        self._seen.update(fresh)
        return bool(fresh)

    def _picture(self, answer: RunStatus) -> Picture:
        points = self.points
        step_s = points.usual_step_s
        state = _STATES.get(answer.phase, answer.phase)
        eta_s = None
        if state == "training" and step_s is not None:
            eta_s = max(0, answer.steps - answer.step) * step_s
        spares = [agent.name for agent in answer.agents if agent.rank is None]
        notes = (f"Spares: {', '.join(spares)}",) if spares else ()
        return Picture(
            name=f"{answer.run} at {self._address}",
            state=state,
            detail=f"Epoch {answer.epoch}, {answer.ranks} of {answer.wanted} ranks.",
            step=answer.step,
            steps=answer.steps,
            loss=points.last("loss"),
            held_out_loss=points.last("held_out_loss"),
            tokens_per_s=points.last("tokens_per_s"),
            step_s=step_s,
            goodput=answer.goodput,
            elapsed_s=points.last("elapsed_s"),
            eta_s=eta_s,
            seats=self._seats(answer.agents),
            links=link_views(None, points),
            events=tuple(event_view(at, text) for at, text in answer.events),
            notes=notes,
        )

    def _seats(self, agents: list[AgentStatus]) -> tuple[SeatView, ...]:
        memory = by_name(self.points.last_row.get("memory_mb"))
        seats = []
        for agent in agents:
            if agent.rank is None:
                continue
            note = "leaving" if agent.leaving else ""
            # Its configuration is not told: ranks are drawn one behind the other.
            seat = SeatView(
                rank=agent.rank,
                stage=agent.rank,
                replica=0,
                machine=agent.name,
                layers=None,
                memory_mb=memory.get(str(agent.rank)),
                limit_mb=None,
                busy=None,
                note=note,
            )
            seats.append(seat)
        return tuple(sorted(seats, key=lambda seat: seat.rank))


def _asked(address: str, security: Security, rows_from: int) -> RunStatus:
    return status(address, security, rows_from, _ANSWER_S)
