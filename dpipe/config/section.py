"""What the sections of a configuration are made of: `Section`, the number types, `Name`.

    class PipelineConfig(Section):
        '''How the model is cut into stages ...'''

        schedule: Annotated[str, Name(GENERATORS)] = "1f1b"
        '''Which micro-batch each rank computes when.'''

The string below a key is its meaning; `dpipe config` and the reference page print it.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dpipe.choices import unknown_name

MAX_CHARACTERS = 1 << 16
MAX_INTEGER = 2**63 - 1
MAX_WAIT_S = 30 * 86_400  # far longer ones do not fit what clocks count in

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=MAX_WAIT_S)]

Choice = TypeVar("Choice")


class Section(BaseModel):
    """A table of the TOML file. Frozen; refuses keys that it does not know, and inf and nan."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=False,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_absurd(cls, value: Any) -> Any:
        """Texts that no system call takes, and numbers that no float counts."""
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, str) and "\0" in each:
                raise PydanticCustomError("absurd", "must not hold a NUL")
            if isinstance(each, str) and len(each) > MAX_CHARACTERS:
                most = {"most": MAX_CHARACTERS}
                raise PydanticCustomError("absurd", "must have at most {most} characters", most)
            if isinstance(each, int) and abs(each) > MAX_INTEGER:
                raise PydanticCustomError("absurd", "must be between -2^63 and 2^63")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """To Python, and so to pydantic, true is the number 1."""
        assert info.field_name is not None
        values = value if isinstance(value, list | tuple) else [value]
        takes_bool = cls.model_fields[info.field_name].annotation is bool
        if not takes_bool and any(isinstance(each, bool) for each in values):
            raise PydanticCustomError("truth", "Input should not be true or false")
        return value


class Name:
    """For `Annotated[str, Name(CHOICES)]`: the value must be the name of one of the choices.

    The table is read when a value is checked, so that what a plug-in has added counts.
    """

    def __init__(
        self,
        choices: Mapping[str, Choice],
        allowed: Callable[[Choice], bool] = lambda choice: True,
        *,
        others: tuple[str, ...] = (),
        pattern: str | None = None,
        matches: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`allowed` leaves out choices that this key does not offer; `others` are names besides.
        Those that no table holds are accepted where `matches` is true of them; `pattern` shows
        their form to people.
        """
        self._choices: Mapping[str, Any] = choices
        self._allowed: Callable[[Any], bool] = allowed
        self._others = others
        self._pattern = pattern
        self._matches = matches

    def names(self) -> list[str]:
        offered = [name for name, choice in self._choices.items() if self._allowed(choice)]
        return [*offered, *self._others]

    def shown(self) -> list[str]:
        """The names, and the pattern of others that are accepted."""
        return [*self.names(), *([self._pattern] if self._pattern else [])]

    def check(self, name: str) -> str:
        """Returns `name`. Raises `PydanticCustomError` with the names, the closest one marked."""
        if name in self.names() or self._matches(name):
            return name
        raise PydanticCustomError("name", "{reason}", {"reason": unknown_name(name, self.shown())})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """By which the reference knows the names."""
        return {**handler(schema), "enum": self.shown()}
