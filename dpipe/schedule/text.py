"""A schedule as text: the grid that people read, and the CSV that `torch.distributed.pipelining`
loads.
"""

import csv
import io
from collections.abc import Sequence

from dpipe.errors import ScheduleError
from dpipe.schedule.action import COMPUTE, Action, parse_action
from dpipe.schedule.links import compute_needs
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.size import too_large

Slots = list[Action | None]

_PLACES_SHOWN = 20  # of the stages of a CSV that do not fit each other
_AROUND = 6  # slots shown on each side of a mark: the grid of a real run is wider than a screen


def draw(
    schedule: Schedule,
    mark: Action | None = None,
    ranks: Sequence[int] = (),
) -> str:
    """The grid: one row a rank, one column a unit slot, communication left out; each action as
    early as it can be.

        rank 0 | 0F0 0F1  .   .  0B0 0B1
        rank 1 |  .  1F0 1F1 1B0 1B1  .

    With `mark`, that action stands as `>1F1<` wherever it occurs, and columns far from it are cut.
    What can never start is drawn behind the rest, in program order. `ranks` are the run's, of a
    schedule that is one replica's.
    """
    rows = _in_slots(schedule)
    length = max(map(len, rows))
    first = 0
    last = length
    marked = _columns_of(rows, mark)
    if marked:
        first = max(0, min(marked) - _AROUND)
        last = min(length, max(marked) + _AROUND + 1)
    before = "... " if first else ""
    after = " ..." if last < length else ""
    cells = []
    widths = [1]
    for row in rows:
        shown = [_cell(action, mark) for action in row[first:last]]
        widths += map(len, shown)
        cells.append(shown)
    width = max(widths)
    ranks = ranks or range(len(rows))
    digits = len(str(max(ranks)))
    lines = []
    for rank, line in zip(ranks, cells, strict=True):
        text = f"rank {rank:>{digits}} | {before}{_line(line, width)}{after}"
        lines.append(text.rstrip())
    return "\n".join(lines)


def _columns_of(rows: list[Slots], mark: Action | None) -> list[int]:
    if mark is None:
        return []
    columns = []
    for row in rows:
        for column, action in enumerate(row):
            if action == mark:
                columns.append(column)
    return columns


def to_csv(schedule: Schedule) -> str:
    """One row a rank, one cell a compute action: what `_load_csv(..., format="compute_only")` of
    torch reads.
    """
    rows = io.StringIO()
    # As torch writes it, whose lines end alike on every system.
    writer = csv.writer(rows, lineterminator="\n")
    for program in _compute_programs(schedule):
        cells = list(map(str, program))
        writer.writerow(cells)
    return rows.getvalue()


def _compute_programs(schedule: Schedule) -> list[list[Action]]:
    programs = []
    for lowered in schedule.programs:
        program = [action for action in lowered if action.op in COMPUTE]
        programs.append(program)
    return programs


def from_csv(text: str, name: str = "csv", num_slices: int = 1) -> Schedule:
    """Read what `to_csv` or torch writes; empty cells are idle slots and are dropped. What it
    numbers are slices where there are `num_slices` of each micro-batch.

    Placement and sizes follow from the cells. Raises `ScheduleError` for text that is no CSV, for a
    cell that is no compute action, for stages that have no rank or two, and for more micro-batches
    than a step has; whether the schedule is complete and can run is
    for `check()` to say.
    """
    programs = []
    placed: set[tuple[int, int]] = set()
    num_pieces = 1
    for rank, row in enumerate(_rows(text)):
        program = []
        for column, cell in enumerate(row):
            if not cell.strip():
                continue
            action = _parse_cell(cell, rank, column)
            program.append(action)
            place = (action.stage, rank)
            placed.add(place)
            microbatch = action.microbatch or 0
            num_pieces = max(num_pieces, microbatch + 1)
        programs.append(tuple(program))
    stages = sorted(stage for stage, _ in placed)
    in_order = list(range(len(stages)))
    if not stages or stages != in_order:
        raise ScheduleError(
            "the stages of a CSV must be 0, 1, ... with one rank each; got (stage, rank) "
            f"{sorted(placed)[:_PLACES_SHOWN]}"
        )
    reason = too_large(len(stages), num_pieces)
    if reason is not None:
        raise ScheduleError(f"a schedule in CSV: {reason}")
    rank_of_stage = tuple(rank for _, rank in sorted(placed))
    # Rounded up: for `check()` to say that slices of the last one are missing.
    num_microbatches = -(-num_pieces // num_slices)
    return Schedule(
        num_microbatches,
        rank_of_stage,
        tuple(programs),
        name,
        num_slices=num_slices,
    )


def _rows(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:  # such as a carriage return within a line
        raise ScheduleError(f"a schedule in CSV cannot be read: {error}") from None


def _parse_cell(cell: str, rank: int, column: int) -> Action:
    action = parse_action(cell)
    if action.op not in COMPUTE:
        raise ScheduleError(
            f"row {rank}, cell {column}: {action} is not a compute action; a CSV only holds F, B, "
            "I and W"
        )
    return action


def _in_slots(schedule: Schedule) -> list[Slots]:
    """Each rank's compute actions in unit slots, None where it idles; rows of one length."""
    programs = _compute_programs(schedule)
    rows: list[Slots] = [[] for _ in programs]
    done: set[Action] = set()
    position = [0] * len(programs)
    left = sum(map(len, programs))
    while left:
        # All ranks look before any of them moves: what is done in a slot counts from the next on.
        slot: Slots = []
        for at, program in zip(position, programs, strict=True):
            action = None
            if at < len(program) and _is_ready(schedule, program[at], done):
                action = program[at]
            slot.append(action)
        if not any(slot):
            # Nothing can ever start: the rest is drawn in program order.
            for row, at, program in zip(rows, position, programs, strict=True):
                row += program[at:]
            return _level(rows)
        for rank, action in enumerate(slot):
            rows[rank].append(action)
            if action is not None:
                position[rank] += 1
                done.add(action)
                left -= 1
    return rows


def _is_ready(
    schedule: Schedule,
    action: Action,
    done: set[Action],
) -> bool:
    # An erroneous schedule is drawn as well: it may name stages that it does not have.
    if action.stage >= schedule.num_stages:
        return False
    needs = compute_needs(schedule, action)
    return done.issuperset(needs)


def _level(rows: list[Slots]) -> list[Slots]:
    length = max(map(len, rows))
    level = []
    for row in rows:
        missing = length - len(row)
        level.append(row + [None] * missing)
    return level


def _cell(action: Action | None, mark: Action | None) -> str:
    if action is None:
        return "."
    return f">{action}<" if action == mark else str(action)


def _line(cells: list[str], width: int) -> str:
    centred = [f"{cell:^{width}}" for cell in cells]
    return " ".join(centred)
