"""Every page is in the index, every link has a target, every named file exists."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pages import DOCS, NAMES, PAGES, README, ROOT, anchors, blocks, inline_code, links

import dpipe

STATIC = [page for page in PAGES if page != README]
_PATH = re.compile(r"(?:\./)?((?:scripts|tests|dpipe|netem|docs|\.ci)(?:/[\w.-]+)+/?)")
_MADE = (
    "dpipe/wire/v1",  # by setup.py, from protos/
)


def test_every_page_is_in_the_index() -> None:
    listed = [
        name for block in blocks(DOCS / "index.md", "{toctree}") for name in block.text.split()
    ]
    pages = {page.stem for page in STATIC} - {"index"}
    assert pages <= set(listed)


@pytest.mark.parametrize("name", NAMES)
def test_link_leads_to_a_page_and_a_heading(name: str) -> None:
    page = ROOT / name
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            # Only the form of an address is checked: tests do not use the network.
            assert parts.scheme == "https", link
            assert "." in parts.netloc, link
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.is_file(), f"{name} links to {link}"
        if parts.fragment:
            assert parts.fragment in anchors(target), f"{name} links to {link}"


def files_named(page: Path) -> set[str]:
    code = [*inline_code(page), *(block.text for block in blocks(page, "sh"))]
    return {found for text in code for found in _PATH.findall(text)}


@pytest.mark.parametrize("name", NAMES)
def test_file_that_is_named_exists(name: str) -> None:
    named = files_named(ROOT / name) - set(_MADE)
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing, f"{name} names {sorted(missing)}"


def test_a_file_that_is_not_there_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("see `scripts/nothing.py --mode sim`\n\n```sh\ntests/none/such\n```\n")
    assert files_named(page) == {"scripts/nothing.py", "tests/none/such"}


def test_drawing_of_the_rooms_has_every_room() -> None:
    """The page includes it from the docstring of the package."""
    drawing, _, _ = (dpipe.__doc__ or "").partition("What `__all__` names")
    rooms = {path.parent.name for path in (ROOT / "dpipe").glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / "dpipe").glob("*.py") if "__" not in path.name}
    assert rooms | files <= set(drawing.split())
