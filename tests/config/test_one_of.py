from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import BaseModel, ValidationError

from dpipe.choices import Choices
from dpipe.config.one_of import OneOf


@dataclass
class Colour:
    name: str
    warm: bool


COLOURS = Choices("colour", Colour("red", True), Colour("blue", False))
WARM = OneOf(COLOURS, lambda colour: colour.warm)


class Paint(BaseModel):
    colour: Annotated[str, OneOf(COLOURS)] = "red"
    fire: Annotated[str, WARM] = "red"


def test_name_of_a_choice_is_accepted_and_any_other_value_refused() -> None:
    assert Paint(colour="blue").colour == "blue"
    for wrong in ("green", 3):
        with pytest.raises(ValidationError, match="Input should be 'red' or 'blue'"):
            Paint.model_validate({"colour": wrong})


def test_choice_that_is_not_offered_is_refused() -> None:
    with pytest.raises(ValidationError, match="Input should be 'red' "):
        Paint(fire="blue")


def test_choice_that_is_added_later_is_accepted() -> None:
    COLOURS.add(Colour("orange", True))
    try:
        assert Paint(fire="orange").fire == "orange"
        assert WARM.names == ["red", "orange"]
    finally:
        COLOURS.remove("orange")
