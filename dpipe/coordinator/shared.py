"""What ranks share as a run begins and ends, by the key of `Coordination.share`. The schemas of a
step are with the step (`engine/ballot.py`), and those of a checkpoint with it.
"""

from typing import Annotated

from pydantic import Field

from dpipe.wire.schema import Count, Finite, Port, Schema, Shape, Text


class Place(Shape):
    """Where a rank runs, and the port of its tensor-parallel group's store if it opens one."""

    machine: Text
    name: Text
    port: Port


class Embedded(Shape):
    """What a rank says of the parameter server that it embeds; its session counts if it is rank
    0.
    """

    session: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    port: Port | None


Csv = Annotated[str, Field(pattern=r"^[ -~\r\n]*$")]
# Rank 0's plan: the seconds of each layer if they were measured, programs as CSV, the schedule's
# name, the formats between stages, forward and backward, layers a stage, and the steps between two
# averages of replicas. None from the others.
DECISION = Schema[
    tuple[list[float] | None, str, str, tuple[list[str], list[str]], list[int], int] | None
](tuple[list[Finite] | None, Csv, Text, tuple[list[Text], list[Text]], list[Count], Count] | None)
# The text of the plan that rank 0 has made for the machines that joined; "" from the others.
PLAN = Schema[str](Annotated[str, Field(max_length=4 << 20)])
CHECKPOINT_FOUND = Schema[int](Count)  # its step
PLACE = Schema[Place](Place)
EMBEDDED = Schema[Embedded](Embedded)
STORE_PORT = Schema[int](Port)  # of the store of a torch.distributed group
# Hostname, and the numbers of the cores that the rank may use.
MACHINE = Schema[tuple[str, list[int]]](
    tuple[Text, Annotated[list[Count], Field(min_length=1, max_length=1 << 16)]]
)
