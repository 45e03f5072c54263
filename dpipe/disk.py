"""What must be on the disk before a function returns."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """A file's content; a folder's names. Until then, a power failure may take them back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
