"""Which shard of a published model holds which tensor."""

import json
from pathlib import Path

from dpipe.errors import CheckpointError


def read_index(content: bytes, path: str) -> dict[str, str]:
    """By tensor, the name of its shard. Raises `CheckpointError` for anything but an index."""
    try:
        table = json.loads(content)["weight_map"]
        files = {str(name): Path(file).name for name, file in table.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an index of shards ({type(error).__name__}: {error}): download it again"
        ) from None
    return files
