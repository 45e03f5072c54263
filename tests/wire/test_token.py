"""A file of tokens: which one is shown, which are accepted, and the errors of a bad file."""

import logging
from pathlib import Path

import pytest

from dpipe.errors import JoinError
from dpipe.wire.rpc import Security
from dpipe.wire.token import TokenFile


def test_first_line_is_shown_and_each_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old\r\n\n  new  \n")
    security = Security.load("of the environment", None, None, None, str(path))
    assert security.tokens() == ("old", "new")
    accepted = ("old", "new", "", "of the environment", "ol", "old\n")
    assert [security.accepts(token) for token in accepted] == [True, True] + [False] * 4


def test_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old")
    security = Security(token_file=TokenFile(str(path)))
    path.write_text("new\nold")
    assert security.tokens() == ("new", "old")


def test_unusable_file_changes_nothing_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text("old")
    file = TokenFile(str(path))
    for text in ("", "\n \n", "no\x07bell", "größer"):
        path.write_text(text, encoding="utf-8")
        assert [file.tokens(), file.tokens()] == [("old",)] * 2
    path.unlink()
    assert file.tokens() == ("old",)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "one token a line, in printable ASCII; the tokens stay as they were" in said[0]
    assert "No such file or directory; the tokens stay as they were" in said[1]
    path.write_text("new")
    assert file.tokens() == ("new",)


@pytest.mark.parametrize("content", [None, "", "\x00", "größer"])
def test_bad_file_is_refused_at_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(JoinError, match=r"node\.token_file .*tokens"):
        TokenFile(str(path))


def test_without_a_token_only_the_empty_one_is_accepted() -> None:
    assert Security().accepts("")
    assert not Security().accepts("guess")
    assert not Security("secret").accepts("")
