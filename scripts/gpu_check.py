"""Runs the GPU tests and benchmarks within a time limit, and writes gpu_check.json and gpu_check.md.

    scripts/gpu_check                       on one GPU, 8 minutes at most
    scripts/gpu_check --tiny                the same on a CPU, with a tiny model: tries the script itself

Each model runs in a process of its own, a plain training loop first. What the time was too short for is listed as such.
"""

import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any

import click
import torch

from dpipe.baselines.mfu import MEDIUM, TINY, XL, Case, check_parity, give_back_memory, measure, measure_plain, row

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "model",
    "context",
    "engine",
    "stages",
    "recompute",
    "step_s",
    "tokens_per_s",
    "mfu",
    "memory_gb",
    "over plain",
)
AIM_MFU, AIM_OVER_PLAIN = 0.50, 1.03  # 1.3B in one stage; the engine against a plain loop
NOT_ON_A_GPU = (
    "**Not run on a GPU.** A tiny model on the CPU, whose steps are mostly overhead, tries the script itself: "
    "these figures say nothing of a GPU, nor of the engine at a real size."
)


@dataclass(frozen=True)
class Outcome:
    """What a measurement came to: rows, or why there are none."""

    rows: tuple[dict[str, Any], ...] = ()
    failure: str | None = None


def cases(tiny: bool) -> list[Case]:
    """The most telling first: time may run out."""
    if tiny:
        return [replace(TINY, stages=stages) for stages in (1, 2)]
    models = [
        XL,
        replace(XL, context=1024, microbatch_size=8),
        MEDIUM,
        replace(MEDIUM, context=2048, microbatch_size=4),
    ]
    ways = [(1, "none"), (1, "full"), (4, "none"), (4, "full")]
    return [replace(model, stages=stages, recompute=recompute) for stages, recompute in ways for model in models]


def measured(case: Case) -> list[dict[str, Any]]:
    """dpipe's row; in one stage behind that of a plain loop, measured in the same process just before."""
    if case.device == "cpu":
        torch.set_num_threads(1)  # as each of several processes has
    if case.stages > 1:
        return [row(case, "dpipe", measure(case), None)]
    plain = measure_plain(case)
    give_back_memory()
    ours = measure(case)
    check_parity(case, plain, ours)
    return [row(case, "plain", plain, plain), row(case, "dpipe", ours, plain)]


def in_own_process(case: Case, timeout_s: float) -> Outcome:
    """Memory that a measurement leaves behind goes with its process; so does one that hangs."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_report, args=(case, results))
    process.start()
    try:
        outcome: Outcome = results.get(timeout=max(1.0, timeout_s))
    except Empty:
        outcome = Outcome(failure="the time limit of the check was reached")
    if outcome.failure is not None:
        process.terminate()
    process.join(10)
    return outcome


def _report(case: Case, results: Any) -> None:
    try:
        results.put(Outcome(tuple(measured(case))))
    except Exception as error:
        results.put(Outcome(failure=f"{type(error).__name__}: {str(error).splitlines()[0]}"))


def run_tests(timeout_s: float) -> str:
    """The tests marked `gpu`; pytest's last line."""
    argv = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "tests"]
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"not finished within {timeout_s:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return f"exit code {done.returncode}: {lines[-1] if lines else 'no output'}"


def label(case: Case) -> str:
    stages = f"{case.stages} stage{'s' * (case.stages > 1)}"
    return f"{case.name}, sequence {case.context}, {stages}, recompute {case.recompute}"


def aims(rows: list[dict[str, Any]]) -> list[str]:
    """What was to be reached, and whether it was; nothing of what was not measured."""
    ours = [r for r in rows if r["engine"] == "dpipe" and r["stages"] == 1 and r["recompute"] == "none"]
    best = [r["mfu"] for r in ours if r["model"] == XL.name and r["mfu"] is not None]
    worst = [r["over plain"] for r in ours if r["over plain"] is not None]
    lines = [f"MFU of the 1.3B model in one stage: {max(best):.1%} (aim: at least {AIM_MFU:.0%})"] if best else []
    if worst:
        lines.append(f"engine over a plain loop, at worst: {max(worst):.3f} (aim: at most {AIM_OVER_PLAIN:.2f})")
    return lines


def markdown(report: dict[str, Any]) -> str:
    lines = [
        f"# gpu_check: {report['device']}, {report['date']}",
        "",
        f"torch {report['torch']}, CUDA {report['cuda']}; {report['seconds']:.0f} s. Tests: {report['tests']}",
        "",
        *([NOT_ON_A_GPU, ""] if report["device"] == "CPU" else []),
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(_cell(r[name]) for name in COLUMNS) + " |" for r in report["rows"]),
        "",
        *(f"- {line}" for line in report["aims"]),
        *(f"- not measured: {what}: {why}" for what, why in report["failures"].items()),
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


@click.command()
@click.option("--tiny", is_flag=True, help="A tiny model on the CPU, without the GPU tests: tries the script itself.")
@click.option("--minutes", default=8.0, show_default=True, help="What was not measured by then is left out.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/gpu_check"), show_default=True
)
def main(tiny: bool, minutes: float, out: Path) -> None:
    """Run the GPU tests and benchmarks, and write OUT/gpu_check.json and OUT/gpu_check.md."""
    if not tiny and not torch.cuda.is_available():
        raise click.UsageError(
            f"torch {torch.__version__} sees no CUDA GPU: install a CUDA build of torch and a driver (nvidia-smi must "
            "list the GPU), name its interpreter with PYTHON=, or try the script itself with --tiny"
        )
    began = time.monotonic()
    deadline = began + 60 * minutes
    tests = "left out" if tiny else run_tests(120)
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for case in cases(tiny):
        print(label(case), flush=True)
        left_s = deadline - time.monotonic()
        outcome = in_own_process(case, left_s) if left_s > 0 else Outcome(failure="no time was left")
        rows += outcome.rows
        if outcome.failure is not None:
            failures[label(case)] = outcome.failure
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "CPU" if tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tests": tests,
        "rows": rows,
        "aims": aims(rows),
        "failures": failures,
        "cases": [asdict(case) for case in cases(tiny)],
        "seconds": time.monotonic() - began,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_check.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    (out / "gpu_check.md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
