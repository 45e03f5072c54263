"""README and the pages of docs/ taken apart: blocks of code, links, commands."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and its text."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that a block shows: `# my_model.py` in its first line."""
        named = re.match(r"# ([\w.-]+\.(?:py|toml))\b", self.text)
        return named[1] if named else None


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[Block]:
    every = [Block(language, text) for language, text in _FENCE.findall(text_of(page))]
    return [block for block in every if not languages or block.language in languages]


def prose(page: Path) -> str:
    return _FENCE.sub("", text_of(page))


def inline_code(page: Path) -> list[str]:
    """What stands between backticks, on one line."""
    return [" ".join(code.split()) for code in _INLINE.findall(prose(page))]


def links(page: Path) -> list[str]:
    return _LINK.findall(re.sub(r"`[^`]*`", "", prose(page)))


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and MyST make them."""
    headings = _HEADING.findall(prose(page))
    plain = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def commands(page: Path) -> list[str]:
    """Shell commands: the lines of `sh` blocks, and inline code that starts like one."""
    lines = [line for block in blocks(page, "sh") for line in _joined(block.text).splitlines()]
    without_comments = [re.sub(r"(^|\s{2,}|^\s*)#.*", "", line).strip() for line in lines]
    return [line for line in (*without_comments, *inline_code(page)) if line]


def _joined(text: str) -> str:
    return text.replace("\\\n", " ")
