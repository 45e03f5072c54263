"""What ranks say of the copies that others keep for them: see `elastic.messages.Vouched`."""

from collections.abc import Collection, Mapping

_STEPS_KEPT = 8  # a run goes back to the newest that all hold, or the one before


class Digests:
    """By step and piece, SHA-256 as those said it who trained the piece: replicas may differ."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[int, set[str]]] = {}

    def take(self, step: int, own: Collection[int], digests: Mapping[int, str]) -> None:
        """Of a rank that trains the pieces `own`: of others it knows no more than anybody."""
        by_piece = self._by_step.setdefault(step, {})
        for piece in set(own).intersection(digests):
            by_piece.setdefault(piece, set()).add(digests[piece])
        while len(self._by_step) > _STEPS_KEPT:
            del self._by_step[min(self._by_step)]

    def resumed_at(self, step: int) -> dict[int, list[str]]:
        """Of the state that the run goes on from; those of steps that are made again are
        forgotten.
        """
        for later in [other for other in self._by_step if other > step]:
            del self._by_step[later]
        known = self._by_step.get(step, {})
        return {piece: sorted(digests) for piece, digests in known.items()}
