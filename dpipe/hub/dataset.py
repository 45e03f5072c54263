"""The rows of a data set on the Hugging Face Hub: the files of one split, through its cache.

data.hub = "org/chats:train"             files whose names begin with `train`, in any folder
data.hub = "org/chats@COMMIT:train"      of that branch, tag or commit
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from dpipe.errors import ConfigError

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?:([\w.-]+)", re.ASCII)
_KINDS = ("parquet", "arrow", "jsonl", "json", "csv")
_COMPRESSED = ("", ".gz", ".xz", ".zst")


def split_files(name: str) -> list[Path]:
    """Fetched, sorted. Raises `ConfigError` for a name, a data set or a split that is not there."""
    repository, revision, split = _parsed(name)
    patterns = [f"{split}*.{kind}{ending}" for kind in _KINDS for ending in _COMPRESSED]
    patterns += [f"*/{pattern}" for pattern in patterns]
    with _asking(name):
        folder = snapshot_download(
            repository, repo_type="dataset", revision=revision, allow_patterns=patterns
        )
    # A folder of the cache may hold another split, which was fetched before.
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [Path(path) for path in _of_split(name, map(str, paths))]


def split_urls(name: str) -> list[str]:
    """As `split_files`, for who reads them where they are: of one commit, nothing is fetched."""
    repository, revision, _ = _parsed(name)
    hub = HfApi()
    with _asking(name):
        commit = hub.dataset_info(repository, revision=revision).sha
        files = hub.list_repo_files(repository, repo_type="dataset", revision=commit)
    return [f"hf://datasets/{repository}@{commit}/{path}" for path in _of_split(name, files)]


def _parsed(name: str) -> tuple[str, str | None, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f'data.hub {name!r} must be "org/name:split", or "org/name@revision:split"'
        )
    repository, revision, split = match.groups()
    return repository, revision, split


@contextmanager
def _asking(name: str) -> Iterator[None]:
    try:
        yield
    except (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        httpx2.HTTPError,
        OSError,
    ) as error:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"data.hub {name!r}: {constants.ENDPOINT} does not have it, and the cache not all of "
            f"it ({type(error).__name__}: {text}); check the name, HF_TOKEN and the network"
        ) from None


def _of_split(name: str, paths: Iterable[str]) -> list[str]:
    """Those of `paths` that hold rows of the split, sorted."""
    repository, _, split = _parsed(name)
    kinds = "|".join(_KINDS)
    compressed = "|".join(map(re.escape, _COMPRESSED))
    beginning = re.compile(
        rf"(.*/)?{re.escape(split)}(?![a-zA-Z0-9])[^/]*\.({kinds})({compressed})"
    )
    found = sorted(path for path in paths if beginning.fullmatch(path))
    if not found:
        raise ConfigError(
            f"data.hub {name!r}: no file of {repository} begins with {split!r} and is one of "
            f"{', '.join(_KINDS)}; see {constants.ENDPOINT}/datasets/{repository}/tree/main"
        )
    return found
