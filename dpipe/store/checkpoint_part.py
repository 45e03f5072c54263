"""What each rank tells the others of its part of a checkpoint: `checkpoint.save` shares it, and all
of it becomes the index.
"""

from typing import Annotated

from pydantic import Field

from dpipe.wire.schema import Count, Schema, Shape, Text

# A name that the writer chose would be read from wherever it leads.
FileName = Annotated[
    str, Field(pattern=r"^(model|optimizer)-[0-9]{5,9}-[0-9a-f]{16}\.safetensors$")
]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileFacts(Shape):
    size: Count
    sha256: Digest


class Written(Shape):
    """Of one kind of tensors: the file of each name, and what is in each file."""

    names: dict[Text, FileName] = Field(default_factory=dict)
    files: dict[FileName, FileFacts] = Field(default_factory=dict)


class Layout(Shape):
    """Of a tensor of which several ranks have rows: `stage.tensor_parallel.Shard`."""

    shape: list[Count]
    dim: Count
    parts: Count
    size: Count


class CheckpointPart(Shape):
    # The first tensor that is not finite: then nothing was written.
    bad: Text | None
    model: Written = Written()
    optimizer: Written = Written()
    layouts: dict[Text, Layout]


PART = Schema[CheckpointPart](CheckpointPart)
