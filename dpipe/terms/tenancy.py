"""`Tenancy`: whether this coordinator still is the run's, which may be asked at any time."""

from typing import Literal, Protocol


class Tenancy(Protocol):
    """`dpipe.terms.holding.HeldTerm`, or `Undisputed`."""

    @property
    def number(self) -> int | None:
        """Of the term; None where no other coordinator can take over."""

    @property
    def holds(self) -> bool:
        """Whether anybody may be answered now."""

    @property
    def is_lost(self) -> bool:
        """Whether another coordinator has taken over."""

    def check(self) -> None:
        """Before anything is answered. May wait; raises `TermLost`."""

    def publish(self) -> None:
        """Before anybody hears of what the journal has. May wait; raises `TermLost`."""

    def start(self, address: str) -> None:
        """Machines reach this coordinator there. Until then it holds nothing."""

    def stop_waiting(self) -> None:
        """Have `check` and `publish` raise instead."""

    def close(self, state: Literal["left", "over"] = "left", failure: str | None = None) -> None:
        """The coordinator goes, or the run is over."""

    def lost_to(self) -> str:
        """What there is to say where `is_lost`."""


class Undisputed:
    """Of a coordinator without a standby: its folder, which one process has open, decides."""

    number = None
    holds = True
    is_lost = False

    def start(self, address: str) -> None:
        pass

    def check(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def stop_waiting(self) -> None:
        pass

    def close(self, state: Literal["left", "over"] = "left", failure: str | None = None) -> None:
        pass

    def lost_to(self) -> str:
        raise AssertionError("nobody else coordinates")
