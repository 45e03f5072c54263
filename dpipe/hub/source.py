"""Where a published model lies: a folder, a GGUF file, or the Hugging Face Hub.

    model.hf = "org/name" ──huggingface_hub──> its cache      config, tokenizer: at once
                                               ($HF_HOME)     a shard: when a layer is in it

huggingface_hub itself reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. All files are of the
commit that the first of them was: a branch may move between two downloads.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import constants, get_token, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig

from dpipe.errors import ConfigError
from dpipe.hub.gguf_header import check_gguf

Found = TypeVar("Found")

# All but weights: they are read shard by shard.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
# huggingface_hub resumes a download that ends early; one that is reset it gives up.
_ATTEMPTS = 5


@dataclass(frozen=True)
class ModelSource:
    """`folder` holds the small files; of a repository it is a snapshot in the hub's cache."""

    folder: Path
    gguf: str | None = None  # the name of a GGUF file in it, which is the whole model
    repository: str | None = None
    commit: str | None = None  # of the repository

    def config(self) -> Any:
        """transformers' configuration. Raises `ConfigError` if there is none that it can read."""
        try:
            if self.gguf is not None:
                check_gguf(self.folder / self.gguf)
            return AutoConfig.from_pretrained(self.folder, **self.file_options)
        except Exception as error:  # it depends on the model's class what a broken one raises
            raise ConfigError(
                f"model.hf {self.folder} has no configuration that transformers can read: "
                f"{_in_a_line(error)}"
            ) from None

    @property
    def file_options(self) -> dict[str, Any]:
        """Of transformers' `from_pretrained`."""
        # No code of the folder's own: unless told so, transformers asks at the terminal.
        options = {"local_files_only": True, "trust_remote_code": False}
        return options | ({"gguf_file": self.gguf} if self.gguf else {})

    def refuse_link_out(self, path: Path) -> None:
        """Raises `ConfigError` where `path`, a file in `folder`, is a link to somewhere else: the
        folder may be anybody's, and what is read of it may be exported and published.
        """
        inside = self.folder.resolve()
        target = path.resolve()
        # The hub's cache keeps files beside its snapshots, and links to them.
        blobs = inside.parent.parent / "blobs"
        in_cache = inside.parent.name == "snapshots" and target.is_relative_to(blobs)
        if not (target.is_relative_to(inside) or in_cache):
            raise ConfigError(
                f"{path} is a link out of the folder of model.hf, to {target}: if you want that "
                "file, copy it there"
            )

    def weights_file(self, name: str) -> Path | None:
        """The path of one of the weights' files, fetched if need be; None if there is none."""
        if self.repository is None:
            path = self.folder / name
            self.refuse_link_out(path)
            return path if path.is_file() else None
        repository = self.repository
        try:
            path = _asking(
                repository,
                self.commit,
                lambda: hf_hub_download(repository, name, revision=self.commit),
            )
            return Path(path)
        except _Missing:
            return None


class _Missing(Exception):  # noqa: N818 - never leaves this file
    """The repository has no such file."""


def find_source(name: str, revision: str | None = None) -> ModelSource:
    """Raises `ConfigError` for a `name` that is no folder, no GGUF file and no repository."""
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(path.parent, gguf=path.name)
    if path.is_dir():
        if revision is not None:
            raise ConfigError(f"model.revision is of the hub, and model.hf {name} is a folder")
        return _in_folder(path)
    if not _REPOSITORY.fullmatch(name) or path.exists():
        raise ConfigError(
            f"model.hf {name!r} is not a folder, a GGUF file or the name of a model on the hub"
        )
    snapshot = _asking(
        name,
        revision,
        lambda: snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES]),
    )
    folder = Path(snapshot)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.hf {name!r} has no config.json on the hub; of one with GGUF files fetch the "
            f"file that you want (hf download {name} FILE.gguf), and give its path"
        )
    # The cache calls a snapshot by its commit.
    return ModelSource(folder, repository=name, commit=folder.name)


def _in_folder(folder: Path) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(folder)
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(folder, gguf=files[0])
    if files:
        raise ConfigError(
            f"model.hf {folder} holds {len(files)} GGUF files; name one of them: {', '.join(files)}"
        )
    raise ConfigError(
        f"model.hf {folder} holds no config.json: give a folder that save_pretrained has written, "
        "or one with a GGUF file"
    )


def _asking(repository: str, revision: str | None, ask: Callable[[], Found]) -> Found:
    """What the hub, or its cache, answers. Raises `_Missing`, or `ConfigError`."""
    attempt = 1
    while True:
        try:
            return ask()
        except RemoteEntryNotFoundError:
            raise _Missing from None
        except httpx2.NetworkError as error:
            if attempt == _ATTEMPTS:
                raise _refusal(repository, revision, error) from None
            attempt += 1
        except (
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
            httpx2.HTTPError,
            OSError,
        ) as error:
            raise _refusal(repository, revision, error) from None


def _refusal(repository: str, revision: str | None, error: Exception) -> ConfigError:
    """Why there is no model, and what to change."""
    hub = constants.ENDPOINT
    name = f"model.hf {repository!r}"
    if constants.HF_HUB_OFFLINE:
        return ConfigError(
            f"{name} is not complete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is "
            f"set: unset it, or fetch the model before (hf download {repository})"
        )
    match error:
        case GatedRepoError():
            return ConfigError(
                f"{name} is gated: accept its terms at {hub}/{repository} with the account of "
                "HF_TOKEN"
            )
        case RepositoryNotFoundError():
            access = "HF_TOKEN is not set"
            if get_token():
                access = "the token of HF_TOKEN may not read it"
            return ConfigError(
                f"{name} is neither a folder here nor a model on {hub}, or it is private "
                f"({access}): check the name and the token"
            )
        case RevisionNotFoundError():
            return ConfigError(
                f"model.revision {revision!r} is not a branch, tag or commit of {name}: leave it "
                f"out, or choose one of {hub}/{repository}/tree/main"
            )
    return ConfigError(
        f"{name} is not a folder here, and {hub} does not give it: {_in_a_line(error)}; check the "
        "network and HF_ENDPOINT; what is whole is kept, and the next start continues from there"
    )


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
