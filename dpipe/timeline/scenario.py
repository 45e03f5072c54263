"""What a simulation is of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpipe.errors import ScheduleError
from dpipe.network.link import Host, Network
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas


@dataclass(frozen=True)
class Scenario:
    """A schedule, what its actions cost, and where they run. Raises `ScheduleError` for a schedule
    that does not fit `cost`, and for costs of other stages or of another number of replicas.
    """

    schedule: Schedule
    cost: Cost  # where ranks share cores, of a core to oneself
    network: Network
    hosts: Sequence[Host] = ()  # machines that have fewer cores than ranks
    replicas: Replicas | None = None  # each runs the schedule; their stages agree at REDUCE_GRAD
    ballots: Network | None = None  # what VOTE crosses; None: no rank waits for a vote
    # What actions take and send by replica, where machines or cuts differ; what replicas exchange
    # is that of `cost`.
    costs: Sequence[Cost] = ()

    def __post_init__(self) -> None:
        num_stages = self.schedule.num_stages
        if num_stages != self.cost.num_stages:
            raise ScheduleError(
                f"the schedule has {num_stages} stages, the cost {self.cost.num_stages}"
            )
        if not self.costs:
            return
        num_replicas = 1 if self.replicas is None else self.replicas.count
        if len(self.costs) != num_replicas:
            raise ScheduleError(
                f"there are {num_replicas} replicas, but the costs of {len(self.costs)}"
            )
        for replica, cost in enumerate(self.costs):
            if cost.num_stages != num_stages:
                raise ScheduleError(
                    f"the schedule has {num_stages} stages, the cost of replica {replica} "
                    f"{cost.num_stages}"
                )

    def cost_of(self, replica: int) -> Cost:
        """What actions take and send in one replica."""
        return self.costs[replica] if self.costs else self.cost

    def lowered(self) -> "Scenario":
        """With the sends, receives and exchanges of its schedule, if they are not there yet."""
        if self.schedule.lowered:
            return self
        reduce = self.replicas is not None
        frozen = self.cost.frozen
        return replace(self, schedule=lower(self.schedule, reduce=reduce, frozen=frozen))

    @property
    def replicas_are_alike(self) -> bool:
        """Then one of them is simulated, and stands for all."""
        if self.replicas is None:
            return False
        if any(cost != self.costs[0] for cost in self.costs):
            return False
        if self.ballots is not None and self.ballots.links:
            return False
        num_ranks = self.schedule.num_ranks
        return self.replicas.alike(self.network, num_ranks)
