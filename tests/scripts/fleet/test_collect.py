"""Files from a machine are only written below the run's folder."""

import io
import tarfile
from pathlib import Path

import pytest
from fleet import collect


def sent(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    stream.seek(0)
    return stream


def unpack(stream: io.BytesIO, folder: Path) -> None:
    with tarfile.open(fileobj=stream, mode="r|gz") as tar:
        for member in tar:
            collect.write(tar, member, folder)


def test_file_is_put_below_the_folder_of_the_run(tmp_path: Path) -> None:
    unpack(sent((tarfile.TarInfo("trace/rank-0.json"), b"[]")), tmp_path)
    assert (tmp_path / "trace/rank-0.json").read_bytes() == b"[]"


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil"])
def test_file_that_belongs_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(tarfile.TarError, match="evil is outside the run's folder"):
        unpack(sent((tarfile.TarInfo(name), b"x")), tmp_path)


def test_link_is_left_out(tmp_path: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    unpack(sent((link, b""), (tarfile.TarInfo("file"), b"x")), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
