"""The protocol between lab and guest, with a thread as the guest."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import pytest

from netem import router
from netem.shell import NetemError


def test_guest_that_has_missed_a_line_is_sent_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.setattr(router, "NUDGE_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "console").touch()

    def guest(lines: TextIO) -> None:
        script = Path(lines.readline().strip())
        assert lines.readline() == "\n"
        (tmp_path / "console").write_text(f"done\n@{script.name} 0\n")

    with open(os.open(tmp_path / "pipe", os.O_RDWR)) as lines, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(guest, lines)
        assert router.GuestRouter("nowhere", tmp_path).run("true") == "done\n"
        answering.result(timeout=10)


def test_guest_that_ends_as_it_is_told_is_noticed(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "console").touch()
    guest = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    inner = os.open

    def opened(*args: object) -> int:
        pipe = inner(*args)
        os.close(guest)
        return pipe

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(NetemError, match="router has ended .*; take the lab down and up again"):
        router.GuestRouter("nowhere", tmp_path).run("true")
