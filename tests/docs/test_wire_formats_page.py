"""The page on wire formats lists every format and option, with the bits that each takes."""

import re

import pytest
from pages import DOCS, blocks, text_of

from dpipe.config.load import build
from dpipe.toml import parse_toml
from dpipe.wire.format import FORMATS, OPTIONS, MessageSize, wire_bytes

PAGE = DOCS / "wire-formats.md"
VALUES = 1 << 20


def listed() -> dict[str, str]:
    """Bits by format, as the table has them; two formats may share a row."""
    found = {}
    for names, bits in re.findall(r"^\| (`.*?`) \| (.*?) \|", text_of(PAGE), flags=re.MULTILINE):
        for name in re.findall(r"`(.*?)`", names):
            if name != "pipeline.wire":
                found[name] = bits
    return found


def test_every_format_is_listed_with_its_bits() -> None:
    between_stages = {form.name for form in FORMATS.values() if form.between_stages}
    assert set(listed()) == between_stages
    for name, bits in listed().items():
        if bits != "by shape":
            assert wire_bytes(name, VALUES) * 8 / VALUES == float(bits)


def test_bits_of_a_rank_are_as_said() -> None:
    size = MessageSize((((2048, 2048), 4),))
    assert size.gradient_bytes("rank32") * 8 / 2048**2 == 0.5
    assert size.gradient_bytes("rank32") == 2 * (2048 + 2048) * 32


def test_every_option_is_named() -> None:
    named = re.findall(r"^- `\+(\w+)`", text_of(PAGE), flags=re.MULTILINE)
    assert named == list(OPTIONS)


@pytest.mark.parametrize("block", blocks(PAGE, "toml"), ids=lambda block: block.text[-40:])
def test_configuration_of_the_page_is_one(block) -> None:
    build(parse_toml(block.text))
