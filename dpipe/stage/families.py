"""The model families that `model.layers` names, each declared once. No torch.

Configuration, prediction, data and composition read a family's properties; none of them asks for
one by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dpipe.choices import Choices
from dpipe.stage.flops import (
    bert_layer_flops,
    bert_layer_parameter_bytes,
    gpt_layer_flops,
    gpt_layer_parameter_bytes,
)


@dataclass(frozen=True)
class Family:
    """What the rest of dpipe needs to know of a kind of model, without building one.

    `builder` is called with `vocab_size`, `num_layers`, `width`, `num_heads`, `context`, `dropout`
    and `tied`, and returns a `stage.model.LayeredModel` of `num_layers + 2` layers: an embedding,
    blocks and a head. The two formulas take the sizes as `flops.py` does, and give one value a
    layer; without them the layers are counted as a user's own are.
    """

    # in `model.layers`
    name: str
    # "package.module:function", imported when a model is built; None: no transformer of dpipe's own
    builder: str | None = None
    # of the forward pass of one micro-batch, and of the fp32 parameters; both or neither
    layer_flops: Callable[..., tuple[float, ...]] | None = None
    layer_parameter_bytes: Callable[..., tuple[int, ...]] | None = None
    # False: stages wait instead of computing (`replay.py`); there is no data and nothing is learned
    computes: bool = True
    # True: pairs of passages with token types and lengths (`data/bert_data.py`); the lengths cross
    # every stage boundary. False: windows of a text
    reads_pairs: bool = False
    # whether `dpipe generate` and `run.sample` can continue a text with it
    continues_text: bool = True
    # whether several ranks can hold one stage together (`tensor_parallel.py`)
    tensor_parallel: bool = False
    # whether its sequences can be cut into slices (`passes/slices.py`)
    slices_sequences: bool = False
    # the default of model.tie_embeddings
    ties_embeddings: bool = False
    # what `model.bottleneck_width` makes of it; its builder takes the two bottleneck keys besides
    narrow: "Family | None" = None

    @property
    def is_transformer(self) -> bool:
        """Built from the sizes in `[model]`, with costs that are known by formula."""
        return self.layer_flops is not None


FAMILIES = Choices[Family](
    "model.layers",
    Family(
        "gpt",
        builder="dpipe.stage.gpt:gpt",
        layer_flops=gpt_layer_flops,
        layer_parameter_bytes=gpt_layer_parameter_bytes,
        tensor_parallel=True,
        slices_sequences=True,
        narrow=Family(
            "gpt",
            builder="dpipe.stage.bottleneck:narrow_gpt",
            slices_sequences=True,
        ),
    ),
    Family(
        "bert",
        builder="dpipe.stage.bert:bert",
        layer_flops=bert_layer_flops,
        layer_parameter_bytes=bert_layer_parameter_bytes,
        reads_pairs=True,
        continues_text=False,
        tensor_parallel=True,
        ties_embeddings=True,
    ),
    Family(
        "replay",
        computes=False,
        continues_text=False,
        tensor_parallel=True,
        slices_sequences=True,
    ),
)

# A user's own layers are not in the table: `model.layers` names the function that makes them, and
# whether they can continue a text shows when they are asked to.
USERS_OWN = Family("package.module:function")
# Nor is a published model: `model.hf` names it, and sets `model.layers` to this.
HUB = Family("hf")


def family_of(layers: str) -> Family:
    """The family of a `model.layers` that has been checked."""
    if layers == HUB.name:
        return HUB
    return FAMILIES.get(layers, USERS_OWN)
