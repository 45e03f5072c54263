"""Text from another machine, as it may be shown: a terminal obeys what is in it, and a log's reader
believes it. Every text that enters from the wire goes through `visible` where it enters.
"""

import re

_LINE_WITHOUT_INDENT = re.compile(r"\n(?!  )")


def visible(text: str) -> str:
    """`text` with what a terminal would obey or not show (control characters, C1 and bidi overrides
    included) as escapes such as `\\x1b`. Lines after the first are indented, so that none looks
    like a line of the log. Doing it twice changes nothing.
    """
    if text.isprintable():
        return text
    shown = "".join(_escaped(character) for character in text)
    return _LINE_WITHOUT_INDENT.sub("\n  ", shown)


def _escaped(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return ascii(character)[1:-1]
