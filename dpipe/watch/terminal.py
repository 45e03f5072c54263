"""The picture of a run in a terminal: once, or each second where the terminal can be redrawn."""

import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dpipe.watch.broadcast import PictureSource
from dpipe.watch.picture import LinkView, Picture, SeatView
from dpipe.wire.text import visible

_INTERVAL_S = 1.0
_EVENTS = 8
_STEPS = "▁▂▃▄▅▆▇█"
_WIDTH = 60  # of the curve and the bar
_PREPARED_S = 120.0  # that a prediction and a trace may take where the picture is shown once


def show_in_terminal(source: PictureSource, console: Console | None = None) -> None:
    """Until Ctrl-C, or, where the output is no terminal, once."""
    console = console or Console()
    try:
        if not console.is_terminal:
            console.print(drawn(_prepared(source), losses_of(source)))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(drawn(source.poll(), losses_of(source)), refresh=True)
                time.sleep(_INTERVAL_S)
    except KeyboardInterrupt:
        pass  # who has seen enough
    finally:
        source.close()


def _prepared(source: PictureSource) -> Picture:
    """A picture with its prediction and its trace, which are read beside it."""
    until = time.monotonic() + _PREPARED_S
    picture = source.poll()
    while source.is_preparing and time.monotonic() < until:
        time.sleep(_INTERVAL_S / 10)
        picture = source.poll()
    return picture


def losses_of(source: PictureSource) -> list[float]:
    return [point.loss for point in source.points.points if point.loss is not None]


def drawn(picture: Picture, losses: Sequence[float]) -> RenderableType:
    """Texts of other machines are shown as they are: none is read as markup."""
    parts: list[RenderableType] = [_head(picture)]
    if picture.step is not None and picture.steps:
        done = min(_WIDTH, _WIDTH * picture.step // picture.steps)
        parts.append(Text("━" * done).append("━" * (_WIDTH - done), style="dim"))
    parts.append(Text("   ".join(_figures(picture))))
    if losses:
        parts.append(Text(f"loss  {curve(losses, _WIDTH)}"))
    if picture.binding:
        parts.append(Text(picture.binding))
    if picture.seats:
        parts.append(_seat_table(picture.seats))
    if picture.links:
        parts.append(_link_table(picture.links))
    for event in picture.events[-_EVENTS:]:
        parts.append(Text(f"{event.at}  {event.text}"))
    parts += [Text(visible(note), style="yellow") for note in picture.notes]
    return Group(*parts)


def _head(picture: Picture) -> Text:
    head = Text()
    head.append(visible(picture.name), style="bold")
    head.append(f"  {picture.state}")
    if picture.detail:
        head.append(f"  {visible(picture.detail)}", style="dim")
    return head


def _figures(picture: Picture) -> Iterator[str]:
    if picture.step is not None and picture.steps is not None:
        yield f"step {picture.step} of {picture.steps}"
    for name, value, form in (
        ("loss", picture.loss, ".4f"),
        ("held out", picture.held_out_loss, ".4f"),
        ("tokens/s", picture.tokens_per_s, ",.0f"),
        ("step s", picture.step_s, ".3g"),
        ("predicted s", picture.predicted_step_s, ".3g"),
        ("goodput", picture.goodput, ".1%"),
        ("left s", picture.eta_s, ",.0f"),
        ("price", picture.price, ".3g"),
    ):
        if value is not None:
            yield f"{name} {value:{form}}"


def curve(values: Sequence[float], width: int) -> str:
    """As many blocks as `width`, each the mean of its share of the values."""
    # Fewer values than columns are drawn one each.
    columns = min(width, len(values))
    means = []
    for column in range(columns):
        share = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(share) / len(share))
    low = min(means)
    height = max(means) - low or 1.0
    steps = [round((mean - low) / height * (len(_STEPS) - 1)) for mean in means]
    return "".join(_STEPS[step] for step in steps)


def _seat_table(seats: Sequence[SeatView]) -> Table:
    table = Table("rank", "machine", "layers", "computes", "memory MB", "of MB", "", box=None)
    for seat in seats:
        name = visible(seat.machine or "-")
        cells = [str(seat.rank), name, seat.layers or "-", _shown(seat.busy, ".0%")]
        cells += [_shown(seat.memory_mb, ",.0f"), _shown(seat.limit_mb, ",.0f"), seat.note]
        table.add_row(*map(Text, cells), style="bold red" if seat.binds else None)
    return table


def _link_table(links: Sequence[LinkView]) -> Table:
    table = Table("link", "MB/s", "Gbit/s", "delay ms", "full", "", box=None)
    for link in links:
        name = visible(f"{link.source} → {link.target}")
        cells = [name, _shown(link.mb_per_s, ".3g"), _shown(link.rate_gbps, ".3g")]
        cells += [_shown(link.delay_ms, ".3g"), _shown(link.full, ".0%")]
        cells.append("relayed" if link.relayed else "")
        table.add_row(*map(Text, cells), style="bold red" if link.binds else None)
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
