"""README is short and agrees with the docs."""

import re

import pytest
from pages import DOCS, README, blocks, text_of

from dpipe.schedule.generate import generate
from dpipe.schedule.text import draw


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_readme_is_short() -> None:
    """It was 448 lines and 5,143 words long, and few read it."""
    assert text_of(README).count("\n") <= 150
    assert len([word for word in text_of(README).split() if re.search(r"\w", word)]) <= 1100


@pytest.mark.parametrize("command", ["./scripts/demo", "./scripts/test", "scripts/setup"])
def test_readme_has_the_commands_that_come_first(command: str) -> None:
    assert any(
        line.startswith(command) for b in blocks(README, "sh") for line in b.text.splitlines()
    )


def test_readme_draws_the_schedule_that_the_code_makes() -> None:
    text = text_of(README)
    for line in draw(generate("1f1b", 4, 4)).splitlines():
        assert line.strip() in text


def test_readme_quotes_the_table_of_the_results() -> None:
    """The same rows, perhaps without the column of predictions for the published system."""
    results = {tuple(cells(line)) for line in text_of(DOCS / "results.md").splitlines()}
    quoted = results | {(row[0], row[1], *row[3:]) for row in results if len(row) == 7}
    _, _, rest = text_of(README).partition("<!-- gpt3xl_networks replay -->\n")
    _, _, *table = rest.partition("\n<!-- end -->")[0].splitlines()
    assert len(table) > 5
    assert {tuple(cells(row)) for row in table} <= quoted
