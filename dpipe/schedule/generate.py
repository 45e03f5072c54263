"""Generators: integers in, a compute-only `Schedule` out. They need no model and know no time.

In every schedule each stage runs its forwards, its backwards and its weight gradients in
micro-batch order, so that gradients add up in one order whatever the plan. Stage s lives on rank s
% num_ranks, but for `zb_v`. The pictures are `draw()`'s, one slot an action: they show order and
dependence, not time. `tests/schedule/test_schedule_generate.py` draws them again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from dpipe.choices import Choices
from dpipe.errors import ScheduleError
from dpipe.schedule.action import Action, Op
from dpipe.schedule.schedule import Schedule, backward_piece
from dpipe.schedule.size import too_large
from dpipe.schedule.split import SplitProgram
from dpipe.schedule.two_versions import ahead_by

Program = tuple[Action, ...]


@dataclass(frozen=True)
class Generator:
    """A named way to make a schedule, and what is known of all schedules that it makes.

    `make(num_stages, num_microbatches, **parameters)` gets those of the parameters of `generate()`
    that `takes` lists.
    """

    name: str
    make: Callable[..., Schedule]
    # of "stages_per_rank", "in_flight", "memory_limit", "num_slices"
    takes: frozenset[str] = frozenset()
    splits_backward: bool = False  # into input gradients (I) and weight gradients (W)
    needs_several_stages: bool = False  # a rank: with one a simpler schedule does the same
    # of the weights: with 2 a step computes with those from before the step ahead of it
    num_versions: int = 1
    only_stages_per_rank: int | None = None  # where it can be no other number

    @property
    def takes_several_stages(self) -> bool:
        """Whether a rank may hold more than one stage."""
        return "stages_per_rank" in self.takes

    def deals_out(self, stages_per_rank: int) -> bool:
        """Whether it makes schedules with so many stages a rank."""
        if self.only_stages_per_rank is not None:
            return stages_per_rank == self.only_stages_per_rank
        if stages_per_rank == 1:
            return not self.needs_several_stages
        return self.takes_several_stages


def generate(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 1,
    in_flight: int | None = None,
    memory_limit: int | None = None,
    num_slices: int = 1,
) -> Schedule:
    """The schedule that the generator called `name` makes, one of `GENERATORS`.

    `None` is the generator's own default. Raises `ScheduleError` for an unknown name, for a
    parameter that the generator does not take, and for a step that is `too_large`. `AUTO` is not
    here: it needs the simulator (`dpipe.search`).
    """
    if name not in GENERATORS:
        known = ", ".join(GENERATORS)
        raise ScheduleError(f"no schedule is called {name!r}; choose one of {known}")
    _at_least_one("num_slices", num_slices)
    reason = too_large(num_stages, num_microbatches * num_slices)
    if reason is not None:
        raise ScheduleError(reason)
    generator = GENERATORS[name]
    defaults = {"stages_per_rank": 1, "in_flight": None, "memory_limit": None, "num_slices": 1}
    parameters = {
        "stages_per_rank": stages_per_rank,
        "in_flight": in_flight,
        "memory_limit": memory_limit,
        "num_slices": num_slices,
    }
    for parameter, default in defaults.items():
        if parameter not in generator.takes and parameters.pop(parameter) != default:
            others = who_take(parameter)
            raise ScheduleError(
                f"schedule {name!r} takes no {parameter}: use {others}, or leave it out"
            )
    return generator.make(num_stages, num_microbatches, **parameters)


def who_take(parameter: str) -> str:
    """The generators with `parameter`, for a message: `"gpipe" or "interleaved"`."""
    return _either(g.name for g in GENERATORS.values() if parameter in g.takes)


def names_that_keep_backward_whole() -> str:
    """The generators that never split the backward pass, for a message."""
    return _either(g.name for g in GENERATORS.values() if not g.splits_backward)


def schedule_names() -> tuple[str, ...]:
    """What `pipeline.schedule` may be: the generators, and the search over all of them."""
    return (*GENERATORS, AUTO)


def may_split_backward(name: str) -> bool:
    """Whether schedules called `name`, a value of `pipeline.schedule`, may have I and W for B."""
    return name == AUTO or GENERATORS[name].splits_backward


def gpipe(
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    num_slices: int = 1,
) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019). The simplest; it holds every
    micro-batch. Slices go as in `one_f_one_b`.

    gpipe(3, 3):

        rank 0 | 0F0 0F1 0F2  .   .   .   .  0B0 0B1 0B2
        rank 1 |  .  1F0 1F1 1F2  .   .  1B0 1B1 1B2  .
        rank 2 |  .   .  2F0 2F1 2F2 2B0 2B1 2B2  .   .
    """
    num_pieces = num_microbatches * num_slices
    forwards = forward_only(num_stages, num_pieces, stages_per_rank).programs
    programs = []
    for program in forwards:
        backwards: Program = ()
        # Of each stage the first forward; the last stage goes back first.
        for first in reversed(program[::num_pieces]):
            backwards += _backwards(first.stage, num_pieces, num_slices)
        programs.append(program + backwards)
    return _schedule("gpipe", num_microbatches, num_stages, programs, num_slices)


def forward_only(num_stages: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Forwards alone, for evaluation.

    forward_only(3, 4):

        rank 0 | 0F0 0F1 0F2 0F3  .   .
        rank 1 |  .  1F0 1F1 1F2 1F3  .
        rank 2 |  .   .  2F0 2F1 2F2 2F3
    """
    num_ranks = _ranks(num_stages, stages_per_rank)
    _at_least_one("num_microbatches", num_microbatches)
    return evaluation(in_turn(num_stages, num_ranks), num_microbatches)


def evaluation(rank_of_stage: tuple[int, ...], num_microbatches: int) -> Schedule:
    """`forward_only` for stages that are placed already."""
    num_ranks = max(rank_of_stage) + 1
    programs: list[Program] = [() for _ in range(num_ranks)]
    for stage, rank in enumerate(rank_of_stage):
        programs[rank] += _each(stage, Op.F, num_microbatches)
    return Schedule(num_microbatches, rank_of_stage, tuple(programs), "forward-only")


def one_f_one_b(
    num_stages: int,
    num_microbatches: int,
    in_flight: int | None = None,
    num_slices: int = 1,
) -> Schedule:
    """A few forwards, then one backward and one forward in turn (PipeDream-Flush, Narayanan et al.
    2021).

    `in_flight` is how many micro-batches the first rank holds at most (default: num_stages); a
    later rank holds as many in proportion to its distance from the end. More of them hide a slow
    link, at the price of memory.

    one_f_one_b(3, 4):

        rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
        rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
        rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .

    With `num_slices` each action is of a slice (Seq1F1B, Sun et al. 2024): numbers and `in_flight`
    (default: num_stages + num_slices - 1) count slices, and the last rank holds those of one
    micro-batch, whose backward passes go from the last slice to the first. A message is as much
    smaller, and so is the time until the last rank has its first work.

    one_f_one_b(3, 2, num_slices=2):

        rank 0 | 0F0 0F1 0F2 0F3  .   .  0B1  .  0B0  .  0B3 0B2
        rank 1 |  .  1F0 1F1 1F2  .  1B1 1F3 1B0  .  1B3 1B2  .
        rank 2 |  .   .  2F0 2F1 2B1 2F2 2B0 2F3 2B3 2B2  .   .
    """
    num_pieces = num_microbatches * num_slices
    if in_flight is None:
        in_flight = num_stages + num_slices - 1
    depths = _depths(num_stages, num_pieces, in_flight)
    programs = []
    for rank, depth in enumerate(depths):
        forwards = _each(rank, Op.F, num_pieces)
        backwards = _backwards(rank, num_pieces, num_slices)
        # The first backward pass is of the last slice of the first micro-batch.
        depth = max(depth, num_slices)
        program = _one_and_one(forwards, backwards, depth)
        programs.append(program)
    return _schedule("1f1b", num_microbatches, num_stages, programs, num_slices)


def interleaved(
    num_ranks: int, stages_per_rank: int, num_microbatches: int, in_flight: int | None = None
) -> Schedule:
    """1F1B with several stages a rank, a shorter bubble for more messages (Narayanan et al. 2021).

    Micro-batches go in groups of `num_ranks` or a few more, so that any number of them is welcome:
    a rank takes a group through its first stage, then through its second, and so on. `in_flight` is
    how many activations (stage x micro-batch) the first rank holds at most; a smaller one than a
    group needs to come back raises `ScheduleError`.

    interleaved(2, 2, 4):

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
        rank 1 |  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .
    """
    _at_least_one("num_ranks", num_ranks)
    _at_least_one("stages_per_rank", stages_per_rank)
    _at_least_one("num_microbatches", num_microbatches)
    num_stages = num_ranks * stages_per_rank
    groups = _groups(num_ranks, num_microbatches)
    depths = _interleaved_depths(num_ranks, stages_per_rank, groups, in_flight)

    programs = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forwards: list[Action] = []
        backwards: list[Action] = []
        for group in groups:
            for stage in stages:
                forwards += [Action(stage, Op.F, m) for m in group]
            for stage in reversed(stages):
                backwards += [Action(stage, Op.B, m) for m in group]
        program = _one_and_one(tuple(forwards), tuple(backwards), depths[rank])
        programs.append(program)
    return _schedule("interleaved", num_microbatches, num_stages, programs)


def zero_bubble(
    num_stages: int,
    num_microbatches: int,
    in_flight: int | None = None,
    memory_limit: int | None = None,
) -> Schedule:
    """1F1B with the weight gradient apart, which fills what would be bubbles (Qi et al. 2023).

    Greedy in unit time by the rule of `SplitProgram`; `search.greedy` follows the clock of a
    network. `in_flight` limits the forwards whose input gradient is not done, as in `one_f_one_b`;
    `memory_limit` the micro-batches a rank holds, forward done and weight gradient not (default:
    all).

    zero_bubble(3, 4):

        rank 0 | 0F0 0F1 0F2  .   .  0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3
        rank 1 |  .  1F0 1F1  .  1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3
        rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3
    """
    ranks = split_programs(num_stages, num_microbatches, in_flight, memory_limit)
    while any(rank.unfinished for rank in ranks):
        # All ranks choose before any of them moves: what is done in a slot can be used from the
        # next one on.
        choices = [rank.choose(*_neighbours(ranks, rank.stage)) for rank in ranks]
        for rank, op in zip(ranks, choices, strict=True):
            if op is not None:
                rank.do(op)
    programs = [tuple(rank.program) for rank in ranks]
    return _schedule("zero-bubble", num_microbatches, num_stages, programs)


def zb_v(num_stages: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Two stages a rank, placed so that a micro-batch goes down the ranks and comes up again, with
    the backward pass split: no bubble where F, I and W take equally long and hops nothing, in the
    memory of 1F1B (ZB-V; Qi et al., "Pipeline Parallelism with Controllable Memory", 2024).

    `stages_per_rank` is 2. The last stage lives on the first rank, so that a backward pass begins
    where its forward pass did:

        rank 0   stage 0   stage 7 (loss)
        rank 1   stage 1   stage 6
        rank 2   stage 2   stage 5
        rank 3   stage 3 - stage 4

    zb_v(4, 3):

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2  .
        rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    if stages_per_rank != 2:
        raise ScheduleError(
            f"zb-v has two stages on each rank: stages_per_rank must be 2, got {stages_per_rank}"
        )
    num_ranks = _ranks(num_stages, stages_per_rank)
    _at_least_one("num_microbatches", num_microbatches)
    programs = []
    for rank in range(num_ranks):
        order = _order_of_zb_v(num_ranks, rank, num_microbatches)
        stages = rank, num_stages - 1 - rank
        programs.append(_numbered(order, stages, num_microbatches))
    rank_of_stage = (*range(num_ranks), *reversed(range(num_ranks)))
    return Schedule(num_microbatches, rank_of_stage, tuple(programs), "zb-v")


# As published, for at least as many micro-batches as fill the pipeline; those that there are not
# are left out later.
def _order_of_zb_v(num_ranks: int, rank: int, num_microbatches: int) -> Iterator[tuple[int, Op]]:
    """What `rank` does in turn: on its stage on the way down (0) or up (1), each in order of
    micro-batches.
    """
    down, up = 0, 1
    from_end = num_ranks - rank
    filled = max(num_microbatches, 2 * num_ranks - 1)
    yield from [(down, Op.F)] * (2 * from_end - 1)
    yield from [(up, Op.F), (down, Op.F)] * rank
    yield from [(up, Op.F), (up, Op.I), (up, Op.W)] * from_end
    begun = 2 * from_end - 1 + rank  # forwards on the way down
    for number in range(begun, begun + filled - num_ranks):
        if number < filled:
            yield down, Op.F
        yield from [(down, Op.I), (down, Op.W), (up, Op.F), (up, Op.I), (up, Op.W)]
    yield from [(down, Op.I), (up, Op.I)] * rank
    yield from [(down, Op.I), (down, Op.W)] * from_end
    yield from [(up, Op.W)] * rank
    yield from [(down, Op.W)] * rank


def _numbered(
    order: Iterable[tuple[int, Op]], stages: tuple[int, ...], num_microbatches: int
) -> Program:
    """Actions of the `stages` that `order` names by position, each op in order of micro-batches."""
    numbers: Counter[tuple[int, Op]] = Counter()
    program = []
    for position, op in order:
        number = numbers[position, op]
        numbers[position, op] += 1
        if number < num_microbatches:
            program.append(Action(stages[position], op, number))
    return tuple(program)


def split_programs(
    num_stages: int,
    num_microbatches: int,
    in_flight: int | None = None,
    memory_limit: int | None = None,
) -> list[SplitProgram]:
    """The ranks of a schedule that splits the backward pass, nothing done yet; parameters as in
    `zero_bubble`.
    """
    depths = _depths(num_stages, num_microbatches, in_flight)
    limit = num_microbatches if memory_limit is None else memory_limit
    _at_least_one("memory_limit", limit)
    ranks = []
    for rank, depth in enumerate(depths):
        ranks.append(SplitProgram(rank, num_microbatches, depth, limit))
    return ranks


def least_in_flight(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> int:
    """The smallest `in_flight` with which `interleaved`, or for one stage a rank `one_f_one_b`, can
    run.
    """
    return _least(stages_per_rank, len(_groups(num_ranks, num_microbatches)[0]))


def leanest(
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    num_slices: int = 1,
) -> Schedule:
    """A schedule that holds as few activations as any that `AUTO` chooses from."""
    if stages_per_rank == 1:
        return one_f_one_b(num_stages, num_microbatches, in_flight=1, num_slices=num_slices)
    num_ranks = _ranks(num_stages, stages_per_rank)
    least = least_in_flight(num_ranks, stages_per_rank, num_microbatches)
    return interleaved(num_ranks, stages_per_rank, num_microbatches, least)


def _neighbours(ranks: list[SplitProgram], stage: int) -> tuple[int, int]:
    """How many inputs the rank before `stage` has made for it, and how many gradients the rank
    after.
    """
    own = ranks[stage]
    # The first stage has its inputs from the data, the last its gradients from its own loss.
    inputs = own.num_microbatches
    if stage > 0:
        inputs = ranks[stage - 1].done[Op.F]
    gradients = own.done[Op.F]
    if stage < len(ranks) - 1:
        gradients = ranks[stage + 1].done[Op.I]
    return inputs, gradients


def _one_and_one(forwards: Program, backwards: Program, depth: int) -> Program:
    """`depth` forwards, then a backward and a forward in turn for as long as there are any."""

    def merged() -> Iterator[Action]:
        yield from forwards[:depth]
        for done, backward in enumerate(backwards):
            yield backward
            yield from forwards[depth + done : depth + done + 1]  # none once they have run out

    return tuple(merged())


def _depths(
    num_stages: int,
    num_microbatches: int,
    in_flight: int | None,
) -> list[int]:
    """The micro-batches in flight on each rank: `in_flight` on the first, falling to the last in
    proportion.
    """
    _at_least_one("num_stages", num_stages)
    _at_least_one("num_microbatches", num_microbatches)
    first = num_stages if in_flight is None else in_flight
    _at_least_one("in_flight", first)
    depths = []
    for rank in range(num_stages):
        from_end = num_stages - rank
        depth = -(-first * from_end // num_stages)  # rounded up: 1 on the last rank at least
        depths.append(min(num_microbatches, depth))
    return depths


def _interleaved_depths(
    num_ranks: int, stages_per_rank: int, groups: list[range], in_flight: int | None
) -> list[int]:
    """The activations in flight on each rank, falling from the first rank to the last by equal
    steps.

    Two bounds keep it from waiting for itself. The last stage must get the head of a group before
    the first backward: every rank holds at least `least`. And a rank must not run so far ahead of
    the last one that its forward waits for a backward that waits for that forward: a group goes
    round once each way, so first - last is at most two groups.
    """
    shortest = len(groups[-1])
    longest = len(groups[0])
    least = _least(stages_per_rank, longest)
    first = least + 2 * (num_ranks - 1) if in_flight is None else in_flight
    if first < least:
        raise ScheduleError(
            f"in_flight is {first}, but a group of {longest} micro-batches through "
            f"{stages_per_rank} stages a rank"
            f" needs at least {least}"
        )
    last = max(least, first - 2 * shortest)
    steps = max(1, num_ranks - 1)
    depths = []
    for rank in range(num_ranks):
        left = steps - rank
        more = -(-(first - last) * left // steps)  # rounded up
        depths.append(last + more)
    return depths


def _least(stages_per_rank: int, group: int) -> int:
    # The whole group through every stage but the last, and there the first of it.
    return (stages_per_rank - 1) * group + 1


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Consecutive micro-batches in groups of at least `num_ranks`; sizes differ by one at most,
    longer ones first.
    """
    num_groups = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, num_groups)
    starts = []
    for group in range(num_groups + 1):
        starts.append(group * size + min(group, longer))
    return [range(start, end) for start, end in pairwise(starts)]


def _each(stage: int, op: Op, number: int, first: int = 0) -> Program:
    return tuple(Action(stage, op, microbatch) for microbatch in range(first, first + number))


def _backwards(stage: int, num_pieces: int, num_slices: int) -> Program:
    program = []
    for turn in range(num_pieces):
        piece = backward_piece(turn, num_slices)
        backward = Action(stage, Op.B, piece)
        program.append(backward)
    return tuple(program)


def _schedule(
    name: str,
    num_microbatches: int,
    num_stages: int,
    programs: list[Program],
    num_slices: int = 1,
) -> Schedule:
    rank_of_stage = in_turn(num_stages, len(programs))
    return Schedule(
        num_microbatches,
        rank_of_stage,
        tuple(programs),
        name,
        num_slices=num_slices,
    )


def in_turn(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """By stage, its rank."""
    return tuple(stage % num_ranks for stage in range(num_stages))


def two_versions(
    num_stages: int,
    num_microbatches: int,
    in_flight: int | None = None,
) -> Schedule:
    """1F1B without a pause between steps (see `two_versions.py`). `in_flight` is that of
    `one_f_one_b` (default: 2 * num_stages); as a step ends at most `num_microbatches` of them.
    """
    deepest = 2 * num_stages if in_flight is None else in_flight
    within = _depths(num_stages, 2 * num_microbatches, deepest)
    depths = [min(num_microbatches, depth) for depth in within]
    programs = []
    for rank, ahead in enumerate(ahead_by(depths)):
        depth = depths[rank]
        backwards = _each(rank, Op.B, num_microbatches, ahead)
        forwards = _each(rank, Op.F, num_microbatches, ahead + depth)
        programs.append(_one_and_one(forwards, backwards, within[rank] - depth))
    return replace(_schedule("2bw", num_microbatches, num_stages, programs), num_versions=2)


def _ranks(num_stages: int, stages_per_rank: int) -> int:
    _at_least_one("num_stages", num_stages)
    _at_least_one("stages_per_rank", stages_per_rank)
    if num_stages % stages_per_rank:
        raise ScheduleError(
            f"{num_stages} stages cannot be dealt out by {stages_per_rank} a rank; make it a "
            "multiple"
        )
    return num_stages // stages_per_rank


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise ScheduleError(f"{what} must be at least 1, got {value}")


def _either(names: Iterable[str]) -> str:
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} or {last}" if others else last


def _interleaved(
    num_stages: int, num_microbatches: int, *, stages_per_rank: int, in_flight: int | None
) -> Schedule:
    num_ranks = _ranks(num_stages, stages_per_rank)
    return interleaved(num_ranks, stages_per_rank, num_microbatches, in_flight)


GPIPE = Generator("gpipe", gpipe, takes=frozenset({"stages_per_rank", "num_slices"}))
ONE_F_ONE_B = Generator("1f1b", one_f_one_b, takes=frozenset({"in_flight", "num_slices"}))
INTERLEAVED = Generator(
    "interleaved",
    _interleaved,
    takes=frozenset({"stages_per_rank", "in_flight"}),
    needs_several_stages=True,
)
ZERO_BUBBLE = Generator(
    "zero-bubble",
    zero_bubble,
    takes=frozenset({"in_flight", "memory_limit"}),
    splits_backward=True,
)
ZB_V = Generator(
    "zb-v",
    zb_v,
    takes=frozenset({"stages_per_rank"}),
    splits_backward=True,
    needs_several_stages=True,
    only_stages_per_rank=2,
)
TWO_BW = Generator("2bw", two_versions, takes=frozenset({"in_flight"}), num_versions=2)

GENERATORS: Choices[Generator] = Choices(
    "pipeline.schedule",
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED,
    ZERO_BUBBLE,
    ZB_V,
    TWO_BW,
)
AUTO = "auto"  # no generator: a search among what they make, by simulation
