"""What `dpipe plan` prints."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import combinations, pairwise
from typing import Any

from dpipe.placement.priced import names_of, price_of, price_per_hour
from dpipe.planner.decide import Decided
from dpipe.planner.evaluate import Evaluated
from dpipe.planner.explain import SeatReport, WhatIf, seat_reports, what_ifs
from dpipe.timeline.summary import summarise
from dpipe.toml import to_toml

_ALTERNATIVES = 4
_SEATS = 64  # whose machines are listed one by one
_NAMED = 12


def as_row(decided: Decided) -> dict[str, Any]:
    """One value a key, as `--json` prints them."""
    best = decided.best
    plan = decided.plan
    shape = best.placement.shape
    assert best.forecast is not None
    hourly = None
    if plan.price_per_million_tokens is not None:
        hourly = price_per_hour(decided.problem, best.placement)
    summary = summarise(best.forecast.timeline, best.forecast.schedule)
    return {
        "step_s": plan.step_s,
        "estimated_step_s": float(best.trial.estimate.step_s[0]),
        "bubble": summary.mean_bubble,
        "price_per_hour": hourly,
        "price_per_million_tokens": plan.price_per_million_tokens,
        "stages": shape.stages,
        "replicas": [list(names) for names in plan.replicas],
        "layers_per_stage": _layers_per_stage(best),
        "tensor_parallel": shape.tensor_parallel,
        "num_microbatches": shape.num_microbatches,
        "micro_batch_size": best.config.microbatch_size,
        "schedule": best.schedule.name,
        "recompute": shape.recompute,
        "wire": best.config.pipeline.model_dump()["wire"],
        "data_parallel": {"kind": shape.kind, "wire": shape.exchange_wire},
        "connections": best.network.connections,
        "relay": decided.problem.cluster.relay,
        "relayed": _relayed(decided),
        "left_out": list(decided.left_out),
        "seats": [asdict(report) for report in seat_reports(decided)],
        "what_if": [asdict(each) for each in what_ifs(decided)],
        "alternatives": [_alternative(decided, each) for each in decided.others[:_ALTERNATIVES]],
    }


def _relayed(decided: Decided) -> list[list[str]]:
    """The pairs of machines that the plan has talk through the relay."""
    replicas = decided.plan.replicas
    talking = set()
    for names in replicas:
        talking |= set(pairwise(names))
    # Those that hold a stage agree on its gradients.
    for names in zip(*replicas, strict=True):
        talking |= set(combinations(names, 2))
    relayed = decided.problem.cluster.relayed
    pairs = {tuple(sorted(pair)) for pair in talking if pair in relayed}
    return [list(pair) for pair in sorted(pairs)]


def _layers_per_stage(found: Evaluated) -> list[Any]:
    """By replica where these are cut differently."""
    cuts = [list(cut) for cut in found.placement.cuts]
    return cuts[0] if len(cuts) == 1 else cuts


def _alternative(decided: Decided, found: Evaluated) -> dict[str, Any]:
    placement = found.placement
    step_s = found.step_us / 1e6
    return {
        "step_s": step_s,
        "stages": placement.shape.stages,
        "replicas": placement.shape.replicas,
        "num_microbatches": placement.shape.num_microbatches,
        "machines": len(set(names_of(decided.problem, placement))),
        "price_per_hour": price_per_hour(decided.problem, placement),
        "price_per_million_tokens": price_of(decided.problem, placement, step_s),
    }


def as_text(decided: Decided, row: dict[str, Any]) -> str:
    """The row of `as_row` for a person."""
    return "\n".join(_lines(decided, row))


def _lines(decided: Decided, row: dict[str, Any]) -> Iterator[str]:
    priced = row["price_per_million_tokens"] is not None
    yield f"step            {row['step_s']:.4f} s predicted, bubble {row['bubble']:.1%}"
    if priced:
        yield (
            f"price           {row['price_per_million_tokens']:.4f} a million tokens, "
            f"{row['price_per_hour']:g} an hour"
        )
    yield f"pipeline        {_pipeline(row)}"
    yield f"schedule        {row['schedule']}"
    yield f"recompute       {row['recompute']}"
    wire = row["wire"]
    if not isinstance(wire, str):
        wire = to_toml(wire)
    yield f"wire            {wire} between stages, {row['connections']} connections a link"
    if len(row["replicas"]) > 1:
        kind = row["data_parallel"]["kind"]
        yield f"replicas agree  by {kind}, wire {row['data_parallel']['wire']}"
    yield from _seat_lines(seat_reports_of(row))
    if row["relay"] is not None:
        pairs = ", ".join(" - ".join(pair) for pair in row["relayed"][:_NAMED])
        yield f"relayed         {pairs or 'no link of this plan'}; rank 0 is on {row['relay']}"
    if row["left_out"]:
        names = row["left_out"]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"left out        {', '.join(names[:_NAMED])}{more}: without them a step is shorter"
    yield from _what_if_lines([WhatIf(**each) for each in row["what_if"]])
    yield from _alternative_lines(row, priced)


def _pipeline(row: dict[str, Any]) -> str:
    replicas = len(row["replicas"])
    each = f"{replicas} replicas of " if replicas > 1 else ""
    group = ""
    if row["tensor_parallel"] > 1:
        group = f" of {row['tensor_parallel']} ranks"
    stages = _counted(row["stages"], "stage", "stages")
    micro_batches = _counted(row["num_microbatches"], "micro-batch", "micro-batches")
    return f"{each}{stages}{group}, {micro_batches} of {row['micro_batch_size']}"


def _counted(number: int, one: str, many: str) -> str:
    """Such as "1 stage" and "2 stages"."""
    # A plan of one stage is common: whole replicas, or one machine that is fast enough.
    return f"{number} {one if number == 1 else many}"


def seat_reports_of(row: dict[str, Any]) -> list[SeatReport]:
    return [SeatReport(**seat) for seat in row["seats"]]


def _seat_lines(reports: list[SeatReport]) -> Iterator[str]:
    yield "machines        replica.stage  layers  computes  sends  receives  memory  bound by"
    for report in reports[:_SEATS]:
        place = f"{report.replica}.{report.stage}"
        memory = f"{report.memory:.0%}" if report.memory else "-"
        yield (
            f"  {report.machine:<14}{place:>13}{report.layers:>8}{report.computes:>10.0%}"
            f"{report.sends:>7.0%}{report.receives:>10.0%}{memory:>8}  {report.bound}"
        )
    if len(reports) > _SEATS:
        yield f"  and {len(reports) - _SEATS} more (--json lists all)"


def _what_if_lines(found: list[WhatIf]) -> Iterator[str]:
    for number, each in enumerate(found):
        label = "what if" if number == 0 else ""
        yield f"{label:<16}{each.change}: -{each.gain:.0%}"


def _alternative_lines(row: dict[str, Any], priced: bool) -> Iterator[str]:
    for number, each in enumerate(row["alternatives"]):
        label = "next best" if number == 0 else ""
        slower = each["step_s"] / row["step_s"] - 1
        price = ""
        if priced:
            price = f", {each['price_per_million_tokens']:.4f} a million tokens"
        stages = _counted(each["stages"], "stage", "stages")
        machines = _counted(each["machines"], "machine", "machines")
        micro_batches = _counted(each["num_microbatches"], "micro-batch", "micro-batches")
        yield (
            f"{label:<16}{each['replicas']} x {stages} on {machines}, {micro_batches}: "
            f"{each['step_s']:.4f} s ({slower:+.0%}){price}"
        )
