"""What is at URL/coordinator, where URL is the run's checkpoint_url.

0001-term.json       who holds the first term; created once, and never changed
0001-beat.json       its holder's sign of life, written again and again
0001-journal.sqlite  its journal, beside other files of its folder
0002-term.json       who has taken over from it
"""

from typing import Annotated, Literal

from pydantic import Field

from dpipe.wire.schema import Count, Schema, Shape, Text

RecordId = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Reason = Annotated[Text, Field(max_length=1000)]


class Term(Shape):
    """Who holds it."""

    run: RecordId  # see `store.identity`
    holder: RecordId  # random, of a folder of that run
    host: Text


class HolderBeat(Shape):
    """`count` rises with each; a clock's time would say nothing on another machine."""

    count: Count
    address: Text  # where machines reach the holder
    state: Literal["alive", "left", "over"] = "alive"
    failure: Reason | None = None  # of a run that is over and has failed


TERM = Schema[Term](Term)
HOLDER_BEAT = Schema[HolderBeat](HolderBeat)
