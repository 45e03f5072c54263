"""Keys whose values are the names in a table of choices, which may grow after this is imported."""

from collections.abc import Callable
from typing import Any, Generic

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dpipe.choices import Choice, Choices


class OneOf(Generic[Choice]):
    """Annotates a key of type `str`: its value is the name of a choice that is `offered` for it."""

    def __init__(
        self, table: Choices[Choice], offered: Callable[[Choice], bool] = lambda choice: True
    ) -> None:
        self._table = table
        self._offered = offered

    @property
    def names(self) -> list[str]:
        """The allowed values, in the order of the table."""
        return [name for name, choice in self._table.items() if self._offered(choice)]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if value not in self.names:
            *others, last = [repr(name) for name in self.names]
            expected = f"{', '.join(others)} or {last}" if others else last
            raise PydanticCustomError(
                "one_of", "Input should be {expected}", {"expected": expected}
            )
        return value
