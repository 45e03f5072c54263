"""W&B without a network: what is in RUN/wandb."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpipe.config.load import Config

wandb = pytest.importorskip("wandb", reason="needs pip install dpipe[wandb]")


_HEADER, _BLOCK = struct.Struct("<IHB"), 32768  # of a LevelDB log: checksum, length, kind
_ENDS = (1, 4)  # kinds: a whole record, or the last part of one


def records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a LevelDB log behind seven bytes."""
    at, record = 7, b""
    while at + _HEADER.size <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER.size:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        record += data[at : at + length]
        at += length
        if kind in _ENDS:
            yield record
            record = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of the only run in `folder`, as `wandb sync` finds them."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    kept = [Record.FromString(record) for record in records(file.read_bytes())]
    rows = [record.history.item for record in kept if record.HasField("history")]
    return [
        {"/".join(at.nested_key) or at.key: json.loads(at.value_json) for at in row} for row in rows
    ]


@pytest.mark.filterwarnings("default")  # its imports have some
def test_run_keeps_its_rows_for_a_later_sync(
    tiny: Callable[..., Config],
    losses: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    measured = losses(tiny(run__trackers=("wandb",), pipeline__stages=2))
    rows = [row for row in history(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["loss"] for row in rows] == pytest.approx(measured)
    assert any("0->1" in key for row in rows for key in row)
