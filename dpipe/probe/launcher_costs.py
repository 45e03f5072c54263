"""The layer costs that a launcher has counted, as text in the environment of its ranks; or the
coordinator of an elastic run, as text in its messages.

launcher, coordinator   draft() ── probe() ── to_text()
                                                  |  DPIPE_LAYER_COSTS, Assignment.layer_costs
rank                    draft() <──────────── from_text()

To count them a rank would import torch._dynamo, as torch does for all that it computes on the meta
device: a third of the time in which a rank starts.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from dpipe.errors import ConfigError
from dpipe.probe.layer_costs import LayerCost
from dpipe.wire.schema import Count, Finite, Schema, Shape
from dpipe.wire.spec import TensorSpec

Dtype = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
Sizes = Annotated[list[Count], Field(max_length=64)]


class _Cost(Shape):
    """`LayerCost`."""

    forward_flops: Finite
    parameter_bytes: Count
    outputs: Annotated[list[tuple[Sizes, Dtype]], Field(max_length=1000)]
    attention_cores: Count
    core_flops: Finite
    largest_parameter_bytes: Count
    kept_bytes: Count


_COSTS = Schema[tuple[list[_Cost], list[Count]]](tuple[list[_Cost], list[Count]])


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
    """None if `text` is of another configuration: another launcher's, or none. Raises `ConfigError`
    where it is no such text.
    """
    # A rank may inherit the variable from a run that started its launcher.
    if not text.startswith(f"{digest} "):
        return None
    try:
        tables, indices = _COSTS.read(text.removeprefix(digest).encode())
        distinct = [_from_table(table) for table in tables]
        return tuple(distinct[index] for index in indices)
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"the layer costs that came with the job cannot be read ({error}): unset "
            "DPIPE_LAYER_COSTS, and install one dpipe version everywhere"
        ) from None


def _to_json(cost: LayerCost) -> dict[str, Any]:
    # JSON has no dtype: the name stands for it.
    dtypes = [str(spec.dtype).removeprefix("torch.") for spec in cost.outputs]
    shapes = [spec.shape for spec in cost.outputs]
    return vars(cost) | {"outputs": list(zip(shapes, dtypes, strict=True))}


def _from_table(table: _Cost) -> LayerCost:
    outputs = []
    for shape, name in table.outputs:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is no dtype")
        outputs.append(TensorSpec(tuple(shape), dtype))
    return LayerCost(**{**vars(table), "outputs": tuple(outputs)})
