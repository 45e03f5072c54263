"""Terms at a URL: a folder, fsspec's file system in memory, and S3, in whose place moto answers."""

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from support.object_store import bucket

from dpipe.errors import CheckpointError, ConfigError
from dpipe.terms.records import HolderBeat, Term
from dpipe.terms.storing import TermStore, TermStoreError


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket("terms") as url:
        yield url


def at(kind: str, folder: Path, request: pytest.FixtureRequest) -> TermStore:
    match kind:
        case "folder":
            return TermStore(f"{folder}/run")
        case "memory":
            return TermStore(f"memory://{secrets.token_hex(8)}/run")
        case _:
            return TermStore(f"{request.getfixturevalue('s3')}/{secrets.token_hex(8)}/run")


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TermStore:
    return at(request.param, tmp_path, request)


def of(holder: str) -> Term:
    return Term(run="0" * 16, holder=holder * 16, host="here")


def test_url_without_terms_has_none(store: TermStore) -> None:
    store.refuse_unfit()
    assert store.newest() == 0
    assert store.term(1) is None
    assert store.beat(1) is None
    assert not store.is_claimed(1)


def test_term_is_created_once(store: TermStore) -> None:
    assert store.claim(1, of("a"))
    assert not store.claim(1, of("b"))
    assert store.term(1) == of("a")
    assert store.claim(2, of("b"))
    assert store.newest() == 2


def test_answer_that_was_lost_does_not_lose_the_term(store: TermStore) -> None:
    assert store.claim(1, of("a"))
    assert store.claim(1, of("a"))


def test_one_of_many_that_try_at_once_has_the_term(tmp_path: Path) -> None:
    """In a folder. moto does not promise it (`object_store.bucket`), nor does fsspec's memory,
    which looks whether a name is there, and then writes it.
    """
    store = TermStore(f"{tmp_path}/run")
    holders = "0123456789abcdef"
    together = threading.Barrier(len(holders))
    won = []

    def claim(holder: str) -> None:
        together.wait(20)
        if store.claim(1, of(holder)):
            won.append(holder)

    threads = [threading.Thread(target=claim, args=(holder,)) for holder in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1
    assert store.term(1) == of(won[0])


def test_beat_replaces_the_one_before(store: TermStore) -> None:
    store.claim(1, of("a"))
    for count in range(3):
        store.say(1, HolderBeat(count=count, address="here:1"))
    assert store.beat(1) == HolderBeat(count=2, address="here:1")


def test_old_term_is_forgotten_but_for_who_held_it(store: TermStore) -> None:
    store.claim(1, of("a"))
    store.say(1, HolderBeat(count=1, address="here:1"))
    store.write(1, "journal", b"copy")
    store.forget(1)
    assert store.read(1, "journal") is None
    assert store.term(1) == of("a")
    assert store.beat(1) == HolderBeat(count=1, address="here:1")


def test_damaged_record_is_refused_with_words(store: TermStore) -> None:
    store.claim(1, of("a"))
    store.write(1, "beat.json", b'{"count": "many"}')
    with pytest.raises(
        CheckpointError, match=r"0001-beat\.json is damaged .*stop all coordinators"
    ):
        store.beat(1)


def test_file_system_that_may_create_a_name_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFileSystem, "protocol", "hdfs")
    with pytest.raises(ConfigError, match=r"cannot keep who coordinates.*set run\.checkpoint_url"):
        TermStore(str(tmp_path)).refuse_unfit()


def test_library_that_does_not_send_the_condition_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = MemoryFileSystem.pipe_file

    def forgets(self, path, value, mode="overwrite", **kwargs) -> None:
        inner(self, path, value, mode="overwrite", **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", forgets)
    with pytest.raises(ConfigError, match="takes a second object of one name.*newer version"):
        TermStore(f"memory://{secrets.token_hex(8)}").refuse_unfit()


def test_url_that_does_not_answer_is_said_so(store: TermStore, monkeypatch: pytest.MonkeyPatch):
    class EndpointError(Exception):
        """As botocore's, which is no `OSError`."""

    def fails(*args, **options) -> None:
        raise EndpointError("no route")

    monkeypatch.setattr("dpipe.store.storage.Storage.names", fails)
    with pytest.raises(TermStoreError, match="cannot reach .*: EndpointError: no route"):
        store.newest()
