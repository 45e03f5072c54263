"""A file of tokens, so that the token of a run can be changed while it goes on.

the file                 shown    accepted
old                      old      old
old, new                 old      old, new      on every machine, then
new, old                 new      new, old      on every machine, then
new                      new      new
"""

import logging
from pathlib import Path

from dpipe.errors import JoinError

LOG = logging.getLogger("dpipe")
_MAX_BYTES = 64 << 10


class TokenFile:
    """One token a line: the first is shown, each is accepted."""

    def __init__(self, path: str) -> None:
        """Raises `JoinError` where the file cannot be used."""
        self._path = Path(path)
        self._problem = ""
        self._tokens = self._read()

    def tokens(self) -> tuple[str, ...]:
        """Those of the file as it is now; where it cannot be used any more, those of before, and
        the log says so.
        """
        try:
            self._tokens = self._read()
            # What was wrong may go wrong again, and is then said again.
            self._problem = ""
        except JoinError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                LOG.warning("%s; the tokens stay as they were", error)
        return self._tokens

    def _read(self) -> tuple[str, ...]:
        try:
            # ASCII, since gRPC sends nothing else in a header.
            with self._path.open(encoding="ascii") as file:
                lines = file.read(_MAX_BYTES).split("\n")
        except OSError as error:
            raise JoinError(f"node.token_file {self._path}: {error.strerror}") from None
        except UnicodeDecodeError:
            lines = [""]
        tokens = tuple(line.strip() for line in lines if line.strip())
        if not tokens or not all(map(str.isprintable, tokens)):
            raise JoinError(
                f"node.token_file {self._path} must hold one token a line, in printable ASCII"
            )
        return tokens
