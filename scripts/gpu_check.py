"""Runs the GPU tests and benchmarks within a time limit, and writes gpu_check.json and
gpu_check.md.

    scripts/gpu_check                  on one GPU, 8 minutes at most
    scripts/gpu_check --tiny           a tiny model on a CPU, to test the script itself

Each model runs in a process of its own with its own time limit, so one that hangs does not delay
the others. The files are rewritten after each model, so an interrupted check keeps its results.
They list what was not measured for lack of time.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import click
import torch

from dpipe.bench.mfu import MEDIUM, TINY, XL, Case, compare_mfu, measure, row
from dpipe.report.efficiency import peak_of

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "model",
    "context",
    "batch",
    "engine",
    "stages",
    "recompute",
    "compiled",
    "step_s",
    "tokens_per_s",
    "mfu",
    "memory_gb",
    "over plain",
)
AIM_MFU, AIM_OVER_PLAIN = 0.50, 1.03  # 1.3B in one stage; the engine against a plain loop
TESTS_S = 90.0  # time limit of the GPU tests
# For CUDA, parameters, and the first use of each kernel. Starting processes or compiling takes as
# much again.
START_S = 8.0
# The time limit of a case is PATIENCE times what it takes at LIKELY_MFU.
LIKELY_MFU, PATIENCE = 0.4, 2.5
MODEST_FLOPS = 1e14  # assumed for a GPU whose peak is not known
NOT_ON_A_GPU = (
    "**Not run on a GPU.** A tiny model on the CPU, whose steps are mostly overhead, tries the "
    "script itself: these figures say nothing of a GPU, nor of the engine at a real size."
)


@dataclass(frozen=True)
class Outcome:
    """The rows of a measurement, or why it failed and the traceback."""

    rows: tuple[dict[str, Any], ...] = ()
    failure: str | None = None
    trace: str = ""


@dataclass
class Report:
    """The results so far, and the files that hold them."""

    out: Path
    device: str
    began: float = field(default_factory=time.monotonic)
    tests: str = "left out"
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, outcome: Outcome) -> None:
        self.rows += outcome.rows
        if outcome.failure is not None:
            self.failures[what], self.traces[what] = outcome.failure, outcome.trace
        self.write()

    def write(self) -> None:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.device,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "tests": self.tests,
            "rows": self.rows,
            "aims": aims(self.rows),
            "failures": self.failures,
            "traces": self.traces,  # of the failures
            "seconds": time.monotonic() - self.began,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu_check.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
        (self.out / "gpu_check.md").write_text(markdown(report), encoding="utf-8")


def cases(tiny: bool) -> list[Case]:
    """The most important first, because time may run out.

    In one stage micro-batches are twice as large and half as many, so that gradients are added to
    those of the master weights half as often.
    """
    if tiny:
        return [replace(TINY, stages=stages) for stages in (1, 2)]
    models = [
        XL,
        replace(XL, context=1024, microbatch_size=8),
        MEDIUM,
        replace(MEDIUM, context=2048, microbatch_size=4),
    ]
    large = [
        replace(m, microbatch_size=2 * m.microbatch_size, num_microbatches=m.num_microbatches // 2)
        for m in models
    ]
    cut = [replace(model, stages=4, num_steps=5) for model in models]
    again = [replace(case, recompute="full", num_steps=5) for case in (*large, *cut)]
    return [*large, replace(large[0], compiled=True), *cut, *again]


def expected_s(case: Case, peak_flops: float) -> float:
    """An estimate: recomputation adds a third, and a single stage runs the plain loop as well."""
    again, loops = 4 / 3 if case.recompute == "full" else 1.0, 2 if case.stages == 1 else 1
    starts = 2 if case.stages > 1 or case.compiled else 1
    return START_S * starts + case.num_steps * loops * again * case.step_flops / (
        LIKELY_MFU * peak_flops
    )


def measured(case: Case) -> list[dict[str, Any]]:
    """dpipe's row; for one stage after that of a plain loop, measured in the same process."""
    if case.device == "cpu":
        torch.set_num_threads(1)  # as in each of several processes
    rows = compare_mfu(case) if case.stages == 1 else [row(case, "dpipe", measure(case), None)]
    batch = f"{case.num_microbatches} x {case.microbatch_size}"
    return [{**r, "batch": batch, "compiled": case.compiled} for r in rows]


def in_own_process(case: Case, timeout_s: float) -> Outcome:
    """Measure in a process of its own, which is killed with all its children at the end: their
    memory is freed, and a case that hangs is stopped.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dpipe.bench.mfu"])  # to import torch once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(case, theirs))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        return (
            ours.recv()
            if ours.poll(timeout_s)
            else Outcome(failure=f"not done within {timeout_s:.0f} s, its share")
        )
    except EOFError:
        process.join(10)
        return Outcome(failure=f"its process ended with exit code {process.exitcode}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may not have made its group yet
        process.join(10)


def _report(case: Case, results: Connection) -> None:
    os.setsid()  # a process group, so that its children are killed with it
    try:
        results.send(Outcome(tuple(measured(case))))
    except Exception as error:
        # An error of a child process ends with that process's own message.
        lines = str(error).strip().splitlines() or [""]
        failure = f"{type(error).__name__}: {lines[-1]}"
        results.send(Outcome(failure=failure, trace=traceback.format_exc()))


def run_tests(timeout_s: float, log: Path) -> str:
    """Run the tests marked `gpu`; returns pytest's last line of each file. `log` gets its output.

    Only files with such tests are collected, because others need packages that a machine with a GPU
    may lack. Each file has a process of its own, because a CUDA error breaks the rest of a process.
    """
    deadline = time.monotonic() + timeout_s
    files = [
        f
        for f in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in f.read_text(encoding="utf-8")
    ]
    files.sort(key=lambda file: "run" in file.stem)  # whole runs last: they take the longest
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as out:
        return "; ".join(
            f"{file.stem}: {run_test_file(file, deadline - time.monotonic(), out)}"
            for file in files
        )


def run_test_file(file: Path, timeout_s: float, log: TextIO) -> str:
    """Warnings do not fail here: the installed torch may be newer than the tests."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-rs",
        "-o",
        "filterwarnings=default",
        str(file),
    ]
    if timeout_s <= 0:
        return "no time was left"
    try:
        done = subprocess.run(
            argv,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        log.write((late.stdout or b"").decode(errors="replace"))
        return "not done when the share of the tests was over"
    log.write(done.stdout)
    return f"exit code {done.returncode}, {(done.stdout.strip().splitlines() or ['no output'])[-1]}"


def label(case: Case) -> str:
    stages = f"{case.stages} stage{'s' * (case.stages > 1)}"
    compiled = ", compiled" if case.compiled else ""
    return f"{case.name}, sequence {case.context}, {stages}, recompute {case.recompute}{compiled}"


def aims(rows: list[dict[str, Any]]) -> list[str]:
    """Each aim that was measured, with its result."""
    ours = [
        r for r in rows if r["engine"] == "dpipe" and r["stages"] == 1 and r["recompute"] == "none"
    ]
    best = [r["mfu"] for r in ours if r["model"] == XL.name and r["mfu"] is not None]
    worst = [r["over plain"] for r in ours if r["over plain"] is not None]
    lines = (
        [f"MFU of the 1.3B model in one stage: {max(best):.1%} (aim: at least {AIM_MFU:.0%})"]
        if best
        else []
    )
    if worst:
        lines.append(
            f"engine over a plain loop, at worst: {max(worst):.3f} (aim: at most "
            f"{AIM_OVER_PLAIN:.2f})"
        )
    return lines


def markdown(report: dict[str, Any]) -> str:
    lines = [
        f"# gpu_check: {report['device']}, {report['date']}",
        "",
        f"torch {report['torch']}, CUDA {report['cuda']}; {report['seconds']:.0f} s. Tests: "
        f"{report['tests']}",
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
@click.option(
    "--tiny",
    is_flag=True,
    help="A tiny model on the CPU, without the GPU tests: tries the script itself.",
)
@click.option(
    "--minutes", default=8.0, show_default=True, help="Cases that do not fit in are left out."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/gpu_check"),
    show_default=True,
)
def main(tiny: bool, minutes: float, out: Path) -> None:
    """Run the GPU tests and benchmarks, and write OUT/gpu_check.json and OUT/gpu_check.md."""
    if not tiny and not torch.cuda.is_available():
        raise click.UsageError(
            f"torch {torch.__version__} sees no CUDA GPU: install a CUDA build of torch and a "
            "driver (nvidia-smi must list the GPU), name its interpreter with PYTHON=, or try the "
            "script itself with --tiny"
        )
    deadline = time.monotonic() + 60 * minutes
    report = Report(out, "CPU" if tiny else torch.cuda.get_device_name())
    report.write()
    if not tiny:
        report.tests = run_tests(TESTS_S, out / "gpu_tests.log")
        print(f"GPU tests: {report.tests}", flush=True)
    peak = peak_of(report.device)
    for case in cases(tiny):
        left_s = deadline - time.monotonic()
        if not tiny:
            flops = MODEST_FLOPS if peak is None else peak.flops(case.precision)
            left_s = min(left_s, PATIENCE * expected_s(case, flops))
        print(f"{label(case)}: at most {max(0.0, left_s):.0f} s", flush=True)
        report.add(
            label(case),
            in_own_process(case, left_s) if left_s > 0 else Outcome(failure="no time was left"),
        )
    print((out / "gpu_check.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
