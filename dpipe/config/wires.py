"""`pipeline.wire`: the format of each link between stages, in each direction.

    wire = "bf16"                                          # of all links, both ways
    wire = {forward = "int4", backward = "int8"}
    wire = {forward = "bf16", backward = "bf16", links = {"2-3" = "int8"}}
    wire = "auto"                                          # what pipeline.wire_allowed brings

A link is named after the two stages that it joins.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from dpipe.choices import unknown_name
from dpipe.config.section import Name, Section
from dpipe.wire.format import FORMATS, OPTIONS, Format, HopFormats

AUTO_WIRE = "auto"
_WITH_OPTIONS = "FORMAT+" + "|".join(OPTIONS)


def _offered(form: Format) -> bool:
    return form.between_stages


def _is_offered_with_options(name: str) -> bool:
    # With options, what is wrong is better said by the formats than by a list of names.
    return "+" in name and _offered(FORMATS.named(name))


_NAME = partial(Name, FORMATS, _offered, pattern=_WITH_OPTIONS, matches=_is_offered_with_options)
_OR_AUTO = _NAME(others=(AUTO_WIRE,))
FormatName = Annotated[str, _NAME()]


class DirectedFormats(Section):
    """Of one link. In a file either may be left out: it is then what all links have."""

    forward: FormatName
    backward: FormatName


class WireTable(Section):
    """`pipeline.wire` as a table."""

    forward: FormatName = "none"
    backward: FormatName = "none"
    links: dict[str, DirectedFormats] = Field(default={}, max_length=4096)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, table: Any) -> Any:
        """Each link with both directions: of its own, or those of all links."""
        if not isinstance(table, Mapping) or not isinstance(table.get("links", {}), Mapping):
            return table
        shared = {way: table[way] for way in ("forward", "backward") if way in table}
        everywhere = {"forward": "none", "backward": "none"} | shared
        links = {}
        for name, own in table.get("links", {}).items():
            if isinstance(own, str):
                own = {"forward": own, "backward": own}
            links[name] = {**everywhere, **own} if isinstance(own, Mapping) else own
        return {**table, "links": links}

    def on_hops(self, num_hops: int) -> HopFormats:
        """Raises `ValueError` for a link that a pipeline with so many has not."""
        forward = [self.forward] * num_hops
        backward = [self.backward] * num_hops
        hops = {link_name(hop): hop for hop in range(num_hops)}
        for name, own in self.links.items():
            if name not in hops:
                raise ValueError(f"pipeline.wire.links {unknown_name(name, hops)}")
            forward[hops[name]] = own.forward
            backward[hops[name]] = own.backward
        return HopFormats(tuple(forward), tuple(backward))


class WireSetting:
    """For `Annotated[str | WireTable, WireSetting()]`: the name of a format, "auto", or a table."""

    def check(self, value: Any) -> str | WireTable:
        """Raises `PydanticCustomError` for a name, `ValueError` naming the key for a table."""
        if isinstance(value, str):
            return _OR_AUTO.check(value)
        if isinstance(value, WireTable):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"pipeline.wire must be the name of a format, or a table such as "
                f'{{forward = "int8", backward = "bf16"}}, got {value!r:.200}'
            )
        try:
            return WireTable.model_validate(value)
        except ValidationError as error:
            raise ValueError(_explained(error)) from None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        as_table = core_schema.plain_serializer_function_ser_schema(_dumped)
        return core_schema.no_info_plain_validator_function(self.check, serialization=as_table)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """By which the reference knows the names."""
        name = {"type": "string", "enum": _OR_AUTO.shown()}
        return {"anyOf": [name, {"type": "object"}]}


def _dumped(value: str | WireTable) -> Any:
    return value if isinstance(value, str) else value.model_dump()


def _explained(error: ValidationError) -> str:
    """The first of a table's mistakes."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(["pipeline.wire", *map(str, first["loc"])])
    if first["type"] == "extra_forbidden":
        return f"unknown key {name!r:.200}; a wire has forward, backward and links"
    if first["type"] == "name":
        return f"{name} {first['msg']}"
    return f"{name:.200}: {first['msg']}, got {first['input']!r:.200}"


def link_name(hop: int) -> str:
    """Of the link between stages `hop` and `hop + 1`."""
    return f"{hop}-{hop + 1}"


def wire_of(formats: HopFormats) -> str | dict[str, Any]:
    """The shortest setting that means `formats`: links are listed where they differ from most."""
    if not formats.forward:
        return "none"
    pairs = list(zip(formats.forward, formats.backward, strict=True))
    [(usual, _)] = Counter(pairs).most_common(1)
    links = {}
    for hop, pair in enumerate(pairs):
        if pair != usual:
            links[link_name(hop)] = _directed(*pair)
    if not links and usual[0] == usual[1]:
        return usual[0]
    table: dict[str, Any] = {"forward": usual[0], "backward": usual[1]}
    if links:
        table["links"] = links
    return table


def _directed(forward: str, backward: str) -> str | dict[str, str]:
    if forward == backward:
        return forward
    return {"forward": forward, "backward": backward}
