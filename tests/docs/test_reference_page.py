"""The pages generated from the code are complete, and anything without a description is refused."""

import click
import make_reference
import pytest

import dpipe
from dpipe.config.load import Config
from dpipe.config.run import TrainConfig


def test_every_key_is_on_the_page_of_keys() -> None:
    page = make_reference.configuration()
    for section, info in Config.model_fields.items():
        for key in info.annotation.model_fields:
            assert f"`{section}.{key}`" in page


def test_key_without_a_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainConfig.model_fields["steps"], "description", None)
    with pytest.raises(ValueError, match=r"train.steps has no meaning"):
        make_reference.configuration()


def test_every_command_is_on_the_page_of_commands() -> None:
    page = make_reference.command_line()
    for name in make_reference.COMMANDS:
        assert f"## `{name}`\n" in page
        command = make_reference.command(name)
        if isinstance(command, click.Group):
            for inner in command.commands:
                assert f"### `{name} {inner}`\n" in page


def test_every_public_name_is_on_the_page_of_python() -> None:
    page = make_reference.python()
    assert [name for name in dpipe.__all__ if f"## `dpipe.{name}`\n" not in page] == []


def test_signature_shows_what_is_given_by_name_alone() -> None:
    page = make_reference.python()
    assert (
        "generate(\n    name: str,\n    num_stages: int,\n    num_microbatches: int,\n    *,\n"
        in page
    )


def test_public_name_without_a_docstring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpipe.check, "__doc__", None)
    with pytest.raises(ValueError, match=r"dpipe.check has no docstring"):
        make_reference.python()


def test_room_that_does_not_say_why_it_exists_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "dpipe/cellar").mkdir(parents=True)
    (tmp_path / "dpipe/cellar/__init__.py").write_text("")
    monkeypatch.setattr(make_reference, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="dpipe/cellar does not say why it exists"):
        make_reference.rooms()


def test_pages_are_written_where_they_are_included(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(make_reference, "GENERATED", tmp_path)
    monkeypatch.setattr(make_reference, "PAGES", {"rooms.md": make_reference.rooms})
    make_reference.main()
    assert "`dpipe/schedule`" in (tmp_path / "rooms.md").read_text("utf-8")
    included = {
        path.name
        for page in make_reference.ROOT.glob("docs/*.md")
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("```{include} generated/")
        for path in [make_reference.ROOT / "docs" / line.split()[1]]
    }
    monkeypatch.undo()
    assert included == set(make_reference.PAGES)
