"""A plan as a picture: a row a replica, a box a machine, an arrow a link in each direction.

    replica 0   [ a, 9 layers ]  ──  1 Gbit/s, 40 % full  ──>  [ c, 4 layers ]
                [ computes 93 % ]<──  1 Gbit/s, 40 % full  ──   [ computes 88 % ]

What is busy for most of the step is dark; the word in a box is what binds its machine.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from dpipe.errors import ConfigError
from dpipe.planner.decide import Decided
from dpipe.planner.explain import LinkReport, SeatReport, link_reports, seat_reports

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_REPLICAS = 16  # that are drawn
_BOX = (1.1, 0.7)  # width and height
_APART = (2.25, 0.95)  # from box to box
_BESIDE = 0.15  # around all of it
_SPREAD = 0.09  # of the two directions of a link, from its middle
_INCHES = 1.45  # of a unit
_FONT = 8.0
_DPI = 150
_IDLE = 0.15  # how dark something is that does nothing
_DARK = 0.55  # from so dark on, text is white
_BOXES = "Blues"
_LINKS = "YlOrRd"


def draw(decided: Decided, path: str) -> None:
    """As the ending of `path` says: png, svg, pdf. Raises `ConfigError` where it cannot be
    written.
    """
    try:
        # Here: it takes a second to import, and few plans are drawn.
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--png needs matplotlib; install dpipe with the extra: pip install 'dpipe[plot]'"
        ) from None
    shape = decided.best.placement.shape
    rows = min(shape.replicas, _MOST_REPLICAS)
    right = (shape.stages - 1) * _APART[0] + _BOX[0]
    bottom = -(rows - 1) * _APART[1]
    size = (right * _INCHES, (_BOX[1] - bottom) * _INCHES)
    figure = Figure(figsize=size)
    # Over the whole figure: what is beside it, such as a long title, is added as it is saved.
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, right)
    axes.set_ylim(bottom, _BOX[1])
    axes.axis("off")
    axes.text(0, _BOX[1] + _BESIDE, _title(decided, rows), fontsize=_FONT + 2, va="bottom")
    for seat in seat_reports(decided):
        if seat.replica < rows:
            _draw_seat(axes, seat)
    for link in link_reports(decided):
        if link.replica < rows:
            _draw_link(axes, link)
    try:
        figure.savefig(path, dpi=_DPI, bbox_inches="tight", pad_inches=_BESIDE)
    except (OSError, ValueError) as error:  # ValueError: of an ending that is no format
        raise ConfigError(f"--png {Path(path)} cannot be written: {error}") from None


def _title(decided: Decided, rows: int) -> str:
    best = decided.best
    shape = best.placement.shape
    text = f"{best.step_us / 1e6:.3g} s a step, {shape.num_microbatches} micro-batches"
    text += f", schedule {best.schedule.name}"
    if shape.replicas > 1:
        text += f"; {shape.replicas} replicas agree by {shape.kind}"
    if rows < shape.replicas:
        text += f", of which {rows} are shown"
    return text


def _draw_seat(axes: "Axes", seat: SeatReport) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    left = seat.stage * _APART[0]
    bottom = -seat.replica * _APART[1]
    darkness = _IDLE + (1 - _IDLE) * 0.8 * min(1.0, seat.computes)
    box = FancyBboxPatch(
        (left, bottom),
        *_BOX,
        boxstyle="round,pad=0.02,rounding_size=0.06",
        clip_on=False,
        facecolor=colormaps[_BOXES](darkness),
        edgecolor="black",
        linewidth=0.8,
    )
    axes.add_patch(box)
    layers = "layer" if seat.layers == 1 else "layers"
    lines = [
        _cut(seat.machine),
        f"{seat.layers} {layers}",
        f"computes {seat.computes:.0%}",
        f"bound by {seat.bound}",
    ]
    if seat.memory:
        lines.insert(3, f"memory {seat.memory:.0%}")
    axes.text(
        left + _BOX[0] / 2,
        bottom + _BOX[1] / 2,
        "\n".join(lines),
        ha="center",
        va="center",
        fontsize=_FONT,
        color="white" if darkness > _DARK else "black",
    )


def _draw_link(axes: "Axes", link: LinkReport) -> None:
    left = link.stage * _APART[0] + _BOX[0]
    right = (link.stage + 1) * _APART[0]
    middle = -link.replica * _APART[1] + _BOX[1] / 2
    _draw_arrow(axes, left, right, middle + _SPREAD, link.gbps, link.full)
    _draw_arrow(axes, right, left, middle - _SPREAD, link.back_gbps, link.back_full)
    axes.text(
        (left + right) / 2,
        middle,
        f"{link.delay_ms:.3g} ms",
        ha="center",
        va="center",
        fontsize=_FONT - 1,
        color="dimgray",
    )


def _draw_arrow(
    axes: "Axes", start: float, end: float, height: float, gbps: float, full: float
) -> None:
    from matplotlib import colormaps

    towards_right = end > start
    inset = 0.05 if towards_right else -0.05
    darkness = 0.3 + 0.6 * min(1.0, full)
    axes.annotate(
        "",
        xy=(end - inset, height),
        xytext=(start + inset, height),
        arrowprops={
            "arrowstyle": "-|>",
            "color": colormaps[_LINKS](darkness),
            "linewidth": 1 + 3 * min(1.0, full),
        },
    )
    axes.text(
        (start + end) / 2,
        height + (0.05 if towards_right else -0.05),
        f"{_rate(gbps)}, {full:.0%} full",
        ha="center",
        va="bottom" if towards_right else "top",
        fontsize=_FONT - 1,
    )


def _rate(gbps: float) -> str:
    return f"{gbps:.3g} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.3g} Mbit/s"


def _cut(name: str) -> str:
    most = 16
    return name if len(name) <= most else name[: most - 3] + "..."
