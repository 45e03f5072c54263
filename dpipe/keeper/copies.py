"""The state of a piece (`pieces.py`) at a step, as bytes: a safetensors file in memory.

    layers.3.mlp.up.weight                      a parameter or a buffer, whole;
                                                or the part of it that its rank has
    optimizer/layers.3.mlp.up.weight.exp_avg    what a checkpoint has in its optimizer files
    state                                       the numbers of a checkpoint, as the bytes of a JSON

State and names are those of checkpoints (`store/checkpoint.py`), so that any cut can go on from
them, and so is `Loaded`, which they become again. As there, "before step n" means that n steps are
done.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from dpipe.errors import CheckpointError
from dpipe.keeper.pieces import WHOLE_LAYERS, Pieces
from dpipe.store.checkpoint import Loaded, Tensors, with_slices_joined

_LAYER = re.compile(r"layers\.(\d{1,9})\.", re.ASCII)
_OPTIMIZER = "optimizer/"
_STATE = "state"
_WHERE = "the copy in memory"
_MAX_STATE_BYTES = 1 << 16  # some numbers


@dataclass(frozen=True)
class PieceCopy:
    """The state of one piece before `step`."""

    step: int
    piece: int
    content: bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content; made when it is first asked for, because most copies are never
        sent.
        """
        return hashlib.sha256(self.content).hexdigest()


def pack(
    step: int,
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    layers: Iterable[int],
    part: int = 0,
    pieces: Pieces = WHOLE_LAYERS,
) -> list[PieceCopy]:
    """Copies of that part of `layers`, also of those that have no parameters. The tensors may
    change afterwards.

    `tensors` and `optimizer` are named as in a checkpoint, and what this rank has of them.
    """
    numbers = json.dumps(dict(state), sort_keys=True).encode()
    by_layer: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in layers}
    for prefix, named in (("", tensors), (_OPTIMIZER, optimizer)):
        for name, tensor in named.items():
            # safetensors takes no views with gaps.
            whole = tensor.detach().cpu().contiguous()
            by_layer[layer_of(name)][prefix + name] = whole
    copies = []
    for layer, content in by_layer.items():
        content[_STATE] = torch.frombuffer(bytearray(numbers), dtype=torch.uint8)
        copies.append(PieceCopy(step, pieces.number(layer, part), save(content)))
    return copies


def unpack(copies: Iterable[PieceCopy], pieces: Pieces = WHOLE_LAYERS) -> Loaded:
    """What a checkpoint would give of these pieces; of what several have, that of the last one.
    Raises `CheckpointError` if there are none, if they are not all of one step and state, or if one
    is damaged.
    """
    tensors = Tensors(_WHERE)
    optimizer = Tensors(_WHERE)
    states: list[tuple[int, dict[str, Any]]] = []
    for copy in copies:
        content, state = _read(copy, pieces)
        states.append((copy.step, state))
        for key, tensor in content.items():
            if key.startswith(_OPTIMIZER):
                optimizer[key.removeprefix(_OPTIMIZER)] = tensor
            else:
                tensors[key] = tensor
    if not states or any(state != states[0] for state in states):
        steps = sorted({step for step, _ in states})
        raise CheckpointError(f"the copies of the layers are not of one state: steps {steps}")
    step, state = states[0]
    return Loaded(step, state, tensors, with_slices_joined(optimizer, _WHERE))


def check(copy: PieceCopy, pieces: Pieces) -> None:
    """Raises `CheckpointError` if it is damaged, or not of the layer that it is said to be of."""
    _read(copy, pieces)


def layer_of(name: str) -> int:
    """The layer that a parameter, a buffer or a moment belongs to. Raises `CheckpointError` if
    there is none in its name.
    """
    match = _LAYER.match(name)
    if match is None:
        raise CheckpointError(f"{name!a:.200} names no layer")
    return int(match[1])


def _read(copy: PieceCopy, pieces: Pieces) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Its tensors, only of the layer that the copy is said to be of, and its state."""
    own = pieces.name(copy.piece)
    try:
        content = load(copy.content)
    # A name that is not UTF-8 is a ValueError, a dtype that torch lacks a KeyError.
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"the copy of {own} is damaged: {error}") from None
    layer = pieces.layer_of(copy.piece)
    for name in content:
        if name != _STATE and layer_of(name.removeprefix(_OPTIMIZER)) != layer:
            raise CheckpointError(f"the copy of {own} holds {name!a:.200}")
    state = _state_of(content.pop(_STATE, None), own)
    return content, state


def _state_of(tensor: torch.Tensor | None, own: str) -> dict[str, Any]:
    damaged = CheckpointError(f"the copy of {own} is damaged: it has no state")
    if tensor is None or tensor.dtype != torch.uint8 or tensor.numel() > _MAX_STATE_BYTES:
        raise damaged
    try:
        state = json.loads(tensor.numpy().tobytes())
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(state, dict):
        raise damaged
    return state
