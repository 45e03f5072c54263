"""The layer costs that a launcher has counted, as text in the environment of its ranks.

launcher   draft() ── probe() ── to_text()
                                     |  DPIPE_LAYER_COSTS
rank       draft() <──────────── from_text()

To count them a rank would import torch._dynamo, as torch does for all that it computes on the meta
device: a third of the time in which a rank starts.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from dpipe.plan.probe import LayerCost
from dpipe.wire.spec import TensorSpec


def to_text(digest: str, costs: Sequence[LayerCost]) -> str:
    """Of the configuration with that digest. Layers that are alike are written once: Linux takes
    128 KiB a variable.
    """
    # The blocks of a model are alike, so that few costs stand for all its layers.
    distinct = list(dict.fromkeys(costs))
    indices = [distinct.index(cost) for cost in costs]
    tables = [_to_json(cost) for cost in distinct]
    text = json.dumps([tables, indices])
    return f"{digest} {text}"


def from_text(digest: str, text: str) -> tuple[LayerCost, ...] | None:
    """None if `text` is of another configuration: another launcher's, or none."""
    # A rank may inherit the variable from a run that started its launcher.
    if not text.startswith(f"{digest} "):
        return None
    tables, indices = json.loads(text.removeprefix(digest))
    distinct = [_from_json(table) for table in tables]
    return tuple(distinct[index] for index in indices)


def _to_json(cost: LayerCost) -> dict[str, Any]:
    # JSON has no dtype: the name stands for it.
    dtypes = [str(spec.dtype).removeprefix("torch.") for spec in cost.outputs]
    shapes = [spec.shape for spec in cost.outputs]
    return vars(cost) | {"outputs": list(zip(shapes, dtypes, strict=True))}


def _from_json(table: dict[str, Any]) -> LayerCost:
    outputs = []
    for shape, name in table["outputs"]:
        dtype = getattr(torch, name)
        outputs.append(TensorSpec(tuple(shape), dtype))
    fields = table | {"outputs": tuple(outputs)}
    return LayerCost(**fields)
