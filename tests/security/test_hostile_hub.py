"""A published model's folder from anybody: nothing outside it is read into an export, no code of
its own runs, and what is absurd is refused in words.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.bounds import quickly

from dpipe.cli.main import main
from dpipe.config.load import build
from dpipe.errors import CheckpointError, ConfigError, DataError
from dpipe.plan.run_plan import make_model
from dpipe.stage.model import materialise

published = pytest.importorskip("hub.published")
export_run = pytest.importorskip("dpipe.export.folder").export_run
tokenizer_of = pytest.importorskip("dpipe.tokenizer.tokenizer").tokenizer_of


def of_folder(folder: Path) -> Any:
    return build({"model": {"hf": str(folder), "context": 11}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved: Path = published.save("llama", tmp_path / "model")
    return saved


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.json"
    path.write_text('{"key": "precious"}')
    return path


def first_layer(folder: Path) -> None:
    with quickly():
        materialise(make_model(of_folder(folder)), 0, 0, "cpu")


def test_link_out_of_the_folder_is_not_exported(folder: Path, secret: Path, tmp_path: Path) -> None:
    """It was copied into the folder that its reader may publish."""
    (folder / "notes.json").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"notes\.json is a link out of the folder"):
        export_run(of_folder(folder), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_behind_a_link_out_are_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "private.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "private.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors is a link out of the folder"):
        first_layer(folder)


def test_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    """Its snapshots are links to files beside them."""
    blobs = tmp_path / "models--a--b/blobs"
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    first_layer(snapshot)


@pytest.mark.parametrize("name", ["../private.safetensors", "/etc/passwd", "..", ""])
def test_index_that_names_files_elsewhere_reads_none_of_them(
    folder: Path, tmp_path: Path, name: str
) -> None:
    (folder / "model.safetensors").rename(tmp_path / "private.safetensors")
    table = {"weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises((CheckpointError, ConfigError), match="lacks|is a link out|is cut short"):
        first_layer(folder)


def header(table: object, size: int | None = None) -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


ABSURD = {
    "a header of 2^63 bytes": header({}, 1 << 63),
    "a tensor of 2^60 values": header(
        {"model.embed_tokens.weight": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 8]}}
    ),
    "offsets behind the end": header(
        {"model.embed_tokens.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 40]}}
    ),
    "no dtype that there is": header({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}),
    "nothing": b"",
    "no JSON": struct.pack("<Q", 5000) + b"[" * 5000,
}


@pytest.mark.parametrize("content", ABSURD.values(), ids=ABSURD.keys())
def test_absurd_safetensors_are_refused_before_memory_is_taken(
    folder: Path, content: bytes
) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is cut short or damaged|has no whole|hold no"):
        first_layer(folder)


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b"null", b"[]", b'{"model_type": "x"}', b"\xff\xfe"]
)
def test_configuration_that_is_none_is_refused_in_words(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with quickly(), pytest.raises(ConfigError, match=r"model\.hf"):
        make_model(of_folder(folder))


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 10**9}, {"num_hidden_layers": "x"}, {"vocab_size": 2**62}],
    ids=str,
)
def test_absurd_sizes_of_a_configuration_are_refused_before_a_module_is_made(
    folder: Path, change: dict[str, object]
) -> None:
    """Each layer was a module: a thousand million of them end no sooner than the memory."""
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | change))
    with quickly(), pytest.raises(ConfigError, match=r"model\.hf"):
        make_model(of_folder(folder))


def gguf_key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


GGUF = {
    "2^60 keys": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60),
    "2^60 tensors": struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0),
    "an array of 2^60 texts": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    + gguf_key(b"a", 9, struct.pack("<IQ", 8, 1 << 60)),
    "arrays of arrays": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    + gguf_key(b"a", 9, struct.pack("<IQ", 9, 1) * 5000),
    "a name of 2^63 bytes": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 63),
    "nothing": b"",
}


@pytest.mark.parametrize("content", GGUF.values(), ids=GGUF.keys())
def test_absurd_gguf_is_refused_before_it_is_walked_through(tmp_path: Path, content: bytes) -> None:
    """Its reader finds nothing behind the end of a file, as often as the file says."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with quickly(), pytest.raises(ConfigError, match=r"model\.gguf is not a complete GGUF file"):
        make_model(build({"model": {"hf": str(path), "context": 11}}))


def test_pipe_in_place_of_weights_is_not_waited_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks model.safetensors"):
        first_layer(folder)


def test_code_of_the_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    """transformers asked at the terminal whether it may."""
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
    table = json.loads((folder / "config.json").read_text())
    table |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}
    (folder / "config.json").write_text(json.dumps(table))
    with quickly(), pytest.raises(ConfigError, match=r"model\.hf"):
        make_model(of_folder(folder))
    assert not mark.exists()


def write_tokenizer(folder: Path, **changes: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table = {**json.loads(tokenizer.to_str()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(table))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def test_harmless_tokenizer_of_a_folder_is_applied(folder: Path) -> None:
    write_tokenizer(folder)
    assert tokenizer_of(of_folder(folder)).encode("b a x") == [1, 0, 2]


BOMBS: dict[str, dict[str, Any]] = {
    "replacement": {
        "normalizer": {
            "type": "Replace",
            "pattern": {"String": "a"},
            "content": "b " * 10_000,
        }
    },
    "regex": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(a|a|aa)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "ids": {
        "model": {
            "type": "WordLevel",
            "vocab": {"a": 0, "b": 4_000_000_000, "?": 2},
            "unk_token": "?",
        }
    },
}


@pytest.mark.parametrize("changes", BOMBS.values(), ids=BOMBS.keys())
def test_tokenizer_bomb_in_a_models_folder_harms_only_its_own_process(
    folder: Path, changes: dict[str, Any]
) -> None:
    write_tokenizer(folder, **changes)
    with pytest.raises((DataError, ConfigError)):
        tokenizer_of(of_folder(folder)).encode("a")


def test_export_runs_no_code_of_a_run(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no --trust-code, because it takes nothing but published models."""
    run = tmp_path / "run"
    run.mkdir()
    mark = tmp_path / "mark"
    table = tiny().model_dump(mode="json", exclude={"node"})
    for model in (
        {"layers": "os:system", "options": {"command": f"touch {mark}"}},
        {"layers": "os:system", "hf": str(tmp_path), "options": {"command": f"touch {mark}"}},
    ):
        (run / "config.json").write_text(
            json.dumps({**table, "model": {**table["model"], **model}})
        )
        out = tmp_path / "out"
        result = CliRunner().invoke(main, ["export", str(run), "--to", str(out)])
        assert result.exit_code == 2, result.output
        assert not mark.exists()
        assert not out.exists()
