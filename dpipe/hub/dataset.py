"""The rows of a data set on the Hugging Face Hub: the files of one split, through its cache.

data.hub = "org/chats:train"             files whose names begin with `train`, in any folder
data.hub = "org/chats@COMMIT:train"      of that branch, tag or commit
"""

import re
from pathlib import Path

import httpx2
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from dpipe.errors import ConfigError

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?:([\w.-]+)", re.ASCII)
_KINDS = ("parquet", "arrow", "jsonl", "json", "csv")


def split_files(name: str) -> list[Path]:
    """Fetched, sorted. Raises `ConfigError` for a name, a data set or a split that is not there."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f'data.hub {name!r} must be "org/name:split", or "org/name@revision:split"'
        )
    repository, revision, split = match.groups()
    patterns = [f"{split}*.{kind}" for kind in _KINDS]
    patterns += [f"*/{pattern}" for pattern in patterns]
    try:
        folder = snapshot_download(
            repository, repo_type="dataset", revision=revision, allow_patterns=patterns
        )
    except (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        httpx2.HTTPError,
        OSError,
    ) as error:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"data.hub {name!r}: {constants.ENDPOINT} does not give it, and it is not whole in the "
            f"cache ({type(error).__name__}: {text}); check the name, HF_TOKEN and the network"
        ) from None
    # A folder of the cache may hold another split, which was fetched before.
    beginning = re.compile(rf"{re.escape(split)}(?![a-zA-Z0-9])")
    paths = sorted(Path(folder).rglob("*"))
    found = [path for path in paths if path.is_file() and beginning.match(path.name)]
    if not found:
        raise ConfigError(
            f"data.hub {name!r}: no file of {repository} begins with {split!r} and is one of "
            f"{', '.join(_KINDS)}; see {constants.ENDPOINT}/datasets/{repository}/tree/main"
        )
    return found
