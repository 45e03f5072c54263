"""The codecs of a rank's links to the stages before and behind its own."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dpipe.schedule.action import Action, Op
from dpipe.wire.codec import Codec, codec
from dpipe.wire.deltas import Deltas, SampleCache
from dpipe.wire.format import HopFormats

# By hop, and the place of a tensor in what crosses it forward.
SampleCaches = Mapping[tuple[int, int], SampleCache]

_BACKWARD = (Op.SEND_B, Op.RECV_B)
# An action's stage is at this end of its hop, which is named after the stage before it.
_STAGE_BEHIND = (Op.RECV_F, Op.SEND_B)


class HopCodecs:
    """One codec for each tensor that crosses a hop in a direction: it may remember what it sent.
    Where there is a cache, it remembers that by sample. In an evaluation what crosses a hop may be
    of another format.
    """

    def __init__(
        self,
        formats: HopFormats,
        caches: SampleCaches = MappingProxyType({}),
        *,
        remembers: bool = True,
        in_evaluation: HopFormats | None = None,
    ) -> None:
        self._formats = formats
        self._caches = caches
        self._remembers = remembers
        self._in_evaluation = in_evaluation
        self._made: dict[tuple[int, bool, int], Codec] = {}

    def of(self, action: Action, position: int, samples: Sequence[int] = ()) -> Codec:
        """For the tensor at `position` of what `action` sends or receives. Where its rows are of
        `samples`, both ends ask once for each message, in the order of messages.
        """
        backward = action.op in _BACKWARD
        hop = action.stage
        if action.op in _STAGE_BEHIND:
            hop -= 1
        key = (hop, backward, position)
        if key not in self._made:
            names = self._formats.backward if backward else self._formats.forward
            self._made[key] = codec(names[hop], remembers=self._remembers)
        made = self._made[key]
        cache = None if backward else self._caches.get((hop, position))
        if cache is not None and samples and isinstance(made, Deltas):
            return made.visit(samples, cache)
        return made

    def without_memory(self) -> "HopCodecs":
        """They take nothing from the training, and leave nothing for it."""
        return HopCodecs(self._formats, remembers=False, in_evaluation=self._in_evaluation)

    def for_evaluation(self) -> "HopCodecs":
        """Without memory, in formats of their own where there are some."""
        formats = self._in_evaluation or self._formats
        return HopCodecs(formats, remembers=False)
