"""Tables of named choices."""

from typing import NamedTuple

import pytest

from dpipe.choices import Choices
from dpipe.errors import ConfigError


class Colour(NamedTuple):
    name: str


@pytest.fixture
def colours() -> Choices[Colour]:
    return Choices("paint.colour", Colour("red"), Colour("blue"))


def test_choices_keep_the_order_in_which_they_were_declared(colours: Choices[Colour]) -> None:
    colours.add(Colour("amber"))
    assert list(colours) == ["red", "blue", "amber"]


def test_unknown_name_is_refused_with_the_known_ones_and_the_closest(
    colours: Choices[Colour],
) -> None:
    with pytest.raises(ConfigError) as refused:
        colours.named("bleu")
    known = 'paint.colour must be one of "red", "blue", got \'bleu\'; did you mean "blue"?'
    assert str(refused.value) == known


def test_name_is_declared_once(colours: Choices[Colour]) -> None:
    with pytest.raises(ConfigError, match="paint.colour 'red' is declared twice"):
        colours.add(Colour("red"))


def test_choice_can_be_taken_back(colours: Choices[Colour]) -> None:
    colours.remove("red")
    assert "red" not in colours
