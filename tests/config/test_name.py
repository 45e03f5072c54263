"""`Name`: a key whose values are the names of a table."""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import pytest
from pydantic import ValidationError

from dpipe.choices import Choices
from dpipe.config.section import Name, Section


class Colour(NamedTuple):
    name: str
    is_bright: bool = True


COLOURS = Choices("paint.colour", Colour("red"), Colour("blue"), Colour("grey", is_bright=False))


class Paint(Section):
    colour: Annotated[str, Name(COLOURS, allowed=lambda colour: colour.is_bright)] = "red"
    wall: Annotated[
        str, Name(COLOURS, pattern="#RRGGBB", matches=lambda name: name.startswith("#"))
    ] = "grey"


@pytest.fixture
def amber() -> Iterator[str]:
    yield COLOURS.add(Colour("amber")).name
    COLOURS.remove("amber")


def test_name_of_the_table_is_accepted() -> None:
    assert Paint(colour="blue").colour == "blue"


def test_unknown_name_is_refused_with_the_known_ones_and_the_closest() -> None:
    message = 'must be one of "red", "blue", got \'bleu\'; did you mean "blue"\\?'
    with pytest.raises(ValidationError, match=message):
        Paint(colour="bleu")


def test_choice_that_the_key_does_not_offer_is_refused() -> None:
    with pytest.raises(ValidationError, match='must be one of "red", "blue", got \'grey\''):
        Paint(colour="grey")


def test_choice_that_was_added_later_counts(amber: str) -> None:
    assert Paint(colour=amber).colour == amber


def test_name_of_another_form_is_accepted_and_shown() -> None:
    assert Paint(wall="#ff0000").wall == "#ff0000"
    with pytest.raises(ValidationError, match='"grey", "#RRGGBB", got \'pink\''):
        Paint(wall="pink")


def test_value_other_than_a_string_is_refused() -> None:
    with pytest.raises(ValidationError, match="Input should be a valid string"):
        Paint.model_validate({"colour": 3})
