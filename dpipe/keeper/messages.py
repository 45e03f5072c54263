"""What goes over a connection with a keeper, once both ends have proved that they know the token.

    asks      {"get": {epoch, step, piece}}                  answers  {size, digest}, then the bytes
    asks      {"put": {epoch, step, piece, size, digest,     answers  {size: 0}: there is room
                       kept}}
                                                                      {held: true}: it is here
              the bytes                                               {size: 0}: they are whole

Requests and answers are JSON behind their size, four bytes, big-endian; an answer may be a
`refusal` instead. A connection carries any number of requests, one after the other.
"""

from typing import Annotated

from pydantic import Field

from dpipe.errors import RunError
from dpipe.wire.schema import Count, Schema, Sha256, Shape, Text


class Refused(RunError):  # noqa: N818 - an answer, not a fault
    """Why a keeper does not do what it is asked; told to the asker."""


class Wanted(Shape):
    """A copy that the asker needs."""

    epoch: Count
    step: Count
    piece: Count


class Offered(Shape):
    """A copy that the asker sends."""

    epoch: Count
    step: Count
    piece: Count
    size: Count
    digest: Sha256
    # Steps that the run may go back to
    kept: Annotated[tuple[Count, ...], Field(max_length=8)] = ()


class Request(Shape):
    get: Wanted | None = None
    put: Offered | None = None


class Answer(Shape):
    size: Count = 0
    held: bool = False  # what is offered is here already: its bytes must not follow
    digest: Sha256 | None = None
    refusal: Text | None = None


REQUEST = Schema[Request](Request)
ANSWER = Schema[Answer](Answer)
