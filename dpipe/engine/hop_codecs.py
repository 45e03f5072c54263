"""The codecs of a rank's links to the stages before and behind its own."""

from dpipe.schedule.action import Action, Op
from dpipe.wire.codec import Codec, codec
from dpipe.wire.format import HopFormats

_BACKWARD = (Op.SEND_B, Op.RECV_B)
# An action's stage is at this end of its hop, which is named after the stage before it.
_STAGE_BEHIND = (Op.RECV_F, Op.SEND_B)


class HopCodecs:
    """One codec for each tensor that crosses a hop in a direction: it may remember what it sent."""

    def __init__(self, formats: HopFormats, *, remembers: bool = True) -> None:
        self._formats = formats
        self._remembers = remembers
        self._made: dict[tuple[int, bool, int], Codec] = {}

    def of(self, action: Action, position: int) -> Codec:
        """For the tensor at `position` of what `action` sends or receives."""
        backward = action.op in _BACKWARD
        hop = action.stage
        if action.op in _STAGE_BEHIND:
            hop -= 1
        key = (hop, backward, position)
        if key not in self._made:
            names = self._formats.backward if backward else self._formats.forward
            self._made[key] = codec(names[hop], remembers=self._remembers)
        return self._made[key]

    def without_memory(self) -> "HopCodecs":
        """For an evaluation: it takes nothing from the training, and leaves nothing for it."""
        return HopCodecs(self._formats, remembers=False)
