"""Rows that are read while a run trains: the sequences are those of the same rows not streamed."""

import gc
import gzip
import json
import lzma
import threading
import time

import fsspec
import numpy as np
import pytest
from data.test_datasets_rows import ROWS, hub  # noqa: F401 - a fixture
from data.test_samples import Letters, chat

from dpipe.config.load import build
from dpipe.config.model import DataConfig
from dpipe.data import stream as stream_module
from dpipe.data.rows import find_row_files, rows_of
from dpipe.data.samples import prepare_samples
from dpipe.data.stream import open_stream
from dpipe.errors import ConfigError, DataError

CONTEXT = 24
CHATS = [chat(f"{n}", "x" * (n * 5 % 7 + 1)) for n in range(40)]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Two files, one of which is shorter than a buffer."""
    return write(tmp_path / "a.jsonl", CHATS[:7]), write(tmp_path / "b.jsonl", CHATS[7:])


def data_of(tmp_path, files, **more):
    settings = {"format": "chat", "held_out": 0.0, "cache": str(tmp_path / "cache")} | more
    return DataConfig(files=files, **settings)


def stream_of(tmp_path, files, seed=3, **more):
    data = data_of(tmp_path, files, streaming=True, **more)
    return open_stream(data, Letters(), CONTEXT, seed)


def sequences(source, numbers, seed=3):
    return [source.training_row(seed, number, CONTEXT) for number in numbers]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for column, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(column, other)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", ["none", 5, 1000])
def test_stream_has_the_sequences_of_rows_that_are_not_streamed(shuffle, packing, files, tmp_path):
    """Through three epochs."""
    stream = stream_of(tmp_path, files, shuffle=shuffle, packing=packing)
    samples = prepare_samples(
        data_of(tmp_path, files, shuffle=shuffle, packing=packing), Letters(), CONTEXT
    )
    numbers = range(samples.sequences_in(3.0, 3, CONTEXT))
    assert_equal(sequences(stream, numbers), sequences(samples, numbers))


def test_rows_are_in_another_order_in_every_epoch(files, tmp_path):
    stream = stream_of(tmp_path, files, packing=False)
    texts = [row[0].tobytes() for row in sequences(stream, range(80))]
    assert sorted(texts[:40]) == sorted(texts[40:])
    assert texts[:40] != texts[40:] and texts[:40] != sorted(texts[:40])


@pytest.mark.parametrize("too_long", ["split", "truncate"])
def test_stream_goes_on_at_the_sample_and_opens_no_file_before_it(
    too_long, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(stream_module, "_SEQUENCES_A_MARK", 3)
    (tmp_path / "long.jsonl").write_text(json.dumps(chat("q", "y" * 100)) + "\n")
    files = (files[0], str(tmp_path / "long.jsonl"), files[1])
    more = {"shuffle": 4, "too_long": too_long}
    whole = stream_of(tmp_path, files, **more)
    expected = sequences(whole, range(60))
    rows_read = []

    def counting(file, first):
        rows_read.append((file.name, first))
        return rows_of(file, first)

    monkeypatch.setattr(stream_module, "rows_of", counting)
    for number in range(59, 0, -7):
        again = stream_of(tmp_path, files, **more)
        assert_equal(sequences(again, [number]), [expected[number]])
    begun = rows_read[0]  # that of the last sequence
    assert begun[1] > 0 or begun[0] != files[0]


def test_stream_without_its_marks_comes_to_the_same_sequence(files, tmp_path, monkeypatch):
    """As on another machine."""
    monkeypatch.setattr(stream_module, "_SEQUENCES_A_MARK", 3)
    expected = sequences(stream_of(tmp_path, files), range(50))
    (journal,) = (tmp_path / "cache").glob("stream-*")
    whole = journal.read_text()
    assert len(whole.splitlines()) > 10
    for text in ("", whole[:-4], "[1]\nnonsense\n[9, 9, 9, 9, 9, 9, -9]\n"):
        journal.write_text(text)
        assert_equal(sequences(stream_of(tmp_path, files), [47]), [expected[47]])


def test_stream_goes_back_for_a_step_that_is_done_again(files, tmp_path):
    stream = stream_of(tmp_path, files)
    first = sequences(stream, range(12))
    assert_equal(sequences(stream, range(4, 12)), first[4:])


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "read ahead"]


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_next_buffer_is_made_while_one_is_used_and_no_more(files, tmp_path, monkeypatch):
    made = []

    def counting(file, first):
        for placed in rows_of(file, first):
            made.append(placed)
            yield placed

    monkeypatch.setattr(stream_module, "rows_of", counting)
    monkeypatch.setattr(stream_module, "_AHEAD", 1)
    stream = stream_of(tmp_path, files, shuffle=5, packing=False)
    sequences(stream, [0])
    # The buffer, the next one, and one that finds no room.
    until(lambda: len(made) == 11)
    time.sleep(0.3)
    assert len(made) == 11
    sequences(stream, range(1, 6))
    until(lambda: len(made) == 16)
    stream.close()


@pytest.mark.parametrize("end", ["closed", "dropped", "read again"])
def test_thread_that_reads_ahead_ends_with_its_stream(end, files, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "_AHEAD", 1)
    stream = stream_of(tmp_path, files, shuffle=2)
    sequences(stream, [9])
    (reader,) = readers()
    match end:
        case "closed":
            stream.close()
        case "dropped":
            del stream
            gc.collect()
        case "read again":
            sequences(stream, [0])
            stream.close()
    assert not reader.is_alive()
    assert not readers()


def test_stream_that_was_closed_goes_on(files, tmp_path):
    stream = stream_of(tmp_path, files)
    expected = sequences(stream, range(12))
    stream.close()
    assert_equal(sequences(stream, [11]), [expected[11]])
    stream.close()


def test_file_that_is_streamed_and_held_out_is_refused(files, tmp_path):
    with pytest.raises(DataError, match="b.jsonl is in data.files and in data.held_out"):
        stream_of(tmp_path, files, held_out=(files[1],))


def test_broken_row_of_a_stream_is_named_when_it_is_read(files, tmp_path):
    with open(files[1], "a") as file:
        file.write("{\n")
    stream = stream_of(tmp_path, files, shuffle=4)
    stream.check(need_held_out=False)
    with pytest.raises(DataError, match=r"b.jsonl, line 34 is not JSON.*correct or remove it"):
        sequences(stream, range(60))


def test_stream_without_rows_is_refused(tmp_path):
    empty = stream_of(tmp_path, (write(tmp_path / "empty.jsonl", []),))
    with pytest.raises(DataError, match="hold no rows to train on"):
        empty.check(need_held_out=False)


def test_stream_is_evaluated_on_files_of_their_own(files, tmp_path):
    kept = write(tmp_path / "kept.jsonl", [chat("q", "KEPT")])
    stream = stream_of(tmp_path, files, held_out=(kept,))
    stream.check(need_held_out=True)
    assert b"KEPT" in bytes(stream.held_out_row(0, CONTEXT)[0].tolist())
    none = stream_of(tmp_path, files)
    with pytest.raises(DataError, match="no rows are held out: set data.held_out, or unset"):
        none.check(need_held_out=True)


def test_marks_that_cannot_be_written_are_an_error(files, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "_SEQUENCES_A_MARK", 3)
    stream = stream_of(tmp_path, files)
    stream._journal.mkdir()
    with pytest.raises(DataError, match="cannot be written.*set data.cache"):
        sequences(stream, range(9))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"data": {"streaming": True}}, "data.streaming is of rows: set data.format"),
        ({"data": {"streaming": True, "format": "chat"}}, r"data.held_out 0.05.*name files"),
        (
            {
                "data": {"streaming": True, "format": "chat", "held_out": 0.0},
                "train": {"epochs": 2.0},
            },
            "train.epochs need the number of rows.*set train.steps instead",
        ),
        ({"data": {"format": "chat", "shuffle": 0}}, "data.shuffle"),
    ],
)
def test_what_a_stream_does_not_know_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        build({"model": {"hf": "a/b"}, **table})


@pytest.fixture
def elsewhere():
    """A file system that is no folder, as an object store is none."""
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/", recursive=True)


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_at_a_url_are_those_of_files(streaming, files, tmp_path, elsewhere):
    for name in files:
        elsewhere.put_file(name, f"/bucket/{name.rpartition('/')[2]}")
    there = stream_of(tmp_path, ("memory://bucket/*.jsonl",), shuffle="none")
    if not streaming:
        data = data_of(tmp_path, ("memory://bucket/*.jsonl",), shuffle="none")
        there = prepare_samples(data, Letters(), CONTEXT)
    here = stream_of(tmp_path, files, shuffle="none")
    assert_equal(sequences(there, range(30)), sequences(here, range(30)))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/none.jsonl", "does not exist"),
        ("memory://bucket/*.csv", "does not exist"),
        ("nowhere://bucket/a.jsonl", "cannot be read: ValueError"),
    ],
)
def test_url_that_names_nothing_is_refused(url, message):
    with pytest.raises(DataError, match=f"data.files '.*' {message}"):
        find_row_files([url], "data.files")


def test_broken_row_at_a_url_is_named(elsewhere, tmp_path):
    elsewhere.pipe_file("/bucket/a.jsonl", b'{"messages": 1}\n[]\n')
    (file,) = find_row_files(["memory://bucket/a.jsonl"], "data.files")
    with pytest.raises(DataError, match="memory:///bucket/a.jsonl, line 2 must be a JSON object"):
        list(rows_of(file))


@pytest.mark.parametrize(("ending", "module"), [("gz", gzip), ("xz", lzma)])
def test_compressed_rows_are_those_of_the_file(ending, module, files, tmp_path):
    packed = tmp_path / f"b.jsonl.{ending}"
    with open(files[1], "rb") as plain:
        content = plain.read()
    packed.write_bytes(module.compress(content))
    here = stream_of(tmp_path, files, shuffle="none")
    there = stream_of(tmp_path, (files[0], str(packed)), shuffle="none")
    assert_equal(sequences(there, range(30)), sequences(here, range(30)))
    packed.write_bytes(packed.read_bytes()[:-30])
    (cut,) = find_row_files([str(packed)], "data.files")
    with pytest.raises(DataError, match=rf"b.jsonl.{ending} cannot be read: EOFError"):
        list(rows_of(cut))


def test_rows_a_line_are_read_under_the_name_of_a_list(tmp_path):
    """As many files of the hub are named."""
    path = tmp_path / "rows.json"
    path.write_text('\n{"output": "a"}\n{"output": "b"}\n')
    (file,) = find_row_files([str(path)], "data.files")
    assert list(rows_of(file, 1)) == [(f"{path}, line 3", {"output": "b"})]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_rows_behind_some_are_read_in_every_format(name, tmp_path):
    rows = [{"instruction": str(n), "output": "b"} for n in range(9)]
    path = tmp_path / name
    match path.suffix:
        case ".jsonl":
            write(path, rows)
        case ".json":
            path.write_text(json.dumps(rows))
        case ".csv":
            lines = [",".join(row.values()) for row in rows]
            path.write_text("\n".join(["instruction,output", *lines]))
        case ".parquet":
            parquet = pytest.importorskip("pyarrow.parquet")
            table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
            parquet.write_table(table, path, row_group_size=2)
    (file,) = find_row_files([str(path)], "data.files")
    every = list(rows_of(file))
    assert [row for _, row in every] == rows
    for first in (1, 5, 8, 9):
        assert list(rows_of(file, first)) == every[first:]


def test_parquet_file_that_is_cut_short_is_named(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"text": ["a" * 100] * 50})
    path = tmp_path / "rows.parquet"
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)  # its footer stays
    path.write_bytes(content)
    (file,) = find_row_files([str(path)], "data.files")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read after row 0"):
        list(rows_of(file))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a library's own session
def test_split_of_the_hub_is_streamed_and_not_fetched(hub, tmp_path):  # noqa: F811
    pytest.importorskip("huggingface_hub").HfFileSystem.clear_instance_cache()
    data = DataConfig(
        hub="org/chats:train",
        format="chat",
        held_out=0.0,
        streaming=True,
        shuffle="none",
        cache=str(tmp_path / "cache"),
    )
    there = open_stream(data, Letters(), CONTEXT, 3)
    here = stream_of(tmp_path, (write(tmp_path / "rows.jsonl", ROWS),), shuffle="none")
    assert_equal(sequences(there, range(5)), sequences(here, range(5)))
    assert not list((tmp_path / "hub").rglob("*.parquet"))
