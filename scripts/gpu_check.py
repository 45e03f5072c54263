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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
    "predicted_gb",
    "hidden",
    "over plain",
)
AIM_MFU, AIM_OVER_PLAIN = 0.50, 1.03  # 1.3B in one stage; the engine against a plain loop
AIM_MEMORY = 0.03  # of the memory that tensors took: how far the prediction may be off
AIM_HIDDEN = 0.95  # of the time of sends, where micro-batches are many and there is slack
TESTS_S = 70.0  # time limit of the GPU tests
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


@dataclass(frozen=True)
class Tested:
    """A file of tests: pytest's exit code, None if it came to none, what to say, all it printed."""

    name: str
    code: int | None
    said: str
    output: str = ""


@dataclass
class Report:
    """The results so far, and the files that hold them."""

    out: Path
    device: str
    began: float = field(default_factory=time.monotonic)
    tests: list[Tested] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)

    @property
    def aims(self) -> "list[Aim]":
        """They are a GPU's."""
        return [] if self.device == "CPU" else aims(self.rows)

    @property
    def passed(self) -> bool:
        """Whether all tests ran and passed, all cases were measured, and all aims met."""
        failed = [each for each in self.tests if each.code != 0]
        missed = [aim for aim in self.aims if not aim.met]
        return not (failed or self.failures or missed)

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
            "tests": "; ".join(f"{each.name}: {each.said}" for each in self.tests) or "left out",
            "rows": self.rows,
            "aims": [str(aim) for aim in self.aims],
            "failures": self.failures,
            "traces": self.traces,  # of the failures
            "seconds": time.monotonic() - self.began,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu_check.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
        (self.out / "gpu_check.md").write_text(markdown(report), encoding="utf-8")


# Of gpipe: in 1f1b a rank that has sent waits for an answer, and there is nothing to hide behind.
# The last of 32 sends in each direction hides behind nothing.
MANY = replace(
    MEDIUM,
    name="GPT-2 345M, gpipe",
    stages=2,
    schedule="gpipe",
    microbatch_size=4,
    num_microbatches=32,
    num_steps=4,
)


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
    return [*large, MANY, replace(large[0], compiled=True), *cut, *again]


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


def run_tests(timeout_s: float, log: Path) -> list[Tested]:
    """Run the tests marked `gpu`, all files at once; `log` gets their output.

    Only files with such tests are collected, because others need packages that a machine with a GPU
    may lack. Each file has a process of its own, because a CUDA error breaks the rest of a process.
    """
    files = [
        f
        for f in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in f.read_text(encoding="utf-8")
    ]
    with ThreadPoolExecutor(len(files)) as at_once:
        tested = list(at_once.map(partial(run_test_file, timeout_s=timeout_s), files))
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(each.output for each in tested), encoding="utf-8")
    return tested


def run_test_file(file: Path, timeout_s: float) -> Tested:
    """Warnings do not fail here: the installed torch may be newer than the tests."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-v",  # the test that it was at, if it comes to no end
        "-rs",
        "--durations=5",
        "-o",
        "filterwarnings=default",
        str(file),
    ]
    if timeout_s <= 0:
        return Tested(file.stem, None, "no time was left")
    try:
        done = subprocess.run(
            argv,
            cwd=ROOT,
            # The ranks are threads of one process, beside other files': each would take all cores.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode(errors="replace")  # bytes, even with text=True
        return Tested(file.stem, None, "not done when the share of the tests was over", printed)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    said = f"exit code {done.returncode}, {last}"
    return Tested(file.stem, done.returncode, said, done.stdout)


def label(case: Case) -> str:
    stages = f"{case.stages} stage{'s' * (case.stages > 1)}"
    compiled = ", compiled" if case.compiled else ""
    return f"{case.name}, sequence {case.context}, {stages}, recompute {case.recompute}{compiled}"


@dataclass(frozen=True)
class Aim:
    """What a figure is to be, and what it was."""

    what: str
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else '**missed**'}: {self.what}"


def aims(rows: list[dict[str, Any]]) -> list[Aim]:
    """Each aim that was measured, with its result."""
    ours = [r for r in rows if r["engine"] == "dpipe"]
    at_once = [r for r in ours if r["stages"] == 1 and r["recompute"] == "none"]
    used = _known(at_once, "mfu", XL.name)
    over_plain = _known(at_once, "over plain")
    hidden = _known(ours, "hidden", MANY.name)
    errors = [
        abs(r["predicted_gb"] / r["memory_gb"] - 1)
        for r in ours
        if r["predicted_gb"] is not None and not r["compiled"]
    ]
    found = []
    if used:
        what = f"MFU of the 1.3B model in one stage {max(used):.1%} (at least {AIM_MFU:.0%})"
        found.append(Aim(what, max(used) >= AIM_MFU))
    if over_plain:
        worst = max(over_plain)
        what = f"engine over a plain loop, at worst {worst:.3f} (at most {AIM_OVER_PLAIN:.2f})"
        found.append(Aim(what, worst <= AIM_OVER_PLAIN))
    if errors:
        what = f"predicted memory, off by at most {max(errors):.1%} (at most {AIM_MEMORY:.0%})"
        found.append(Aim(what, max(errors) <= AIM_MEMORY))
    if hidden:
        what = f"sends hidden behind compute, {min(hidden):.1%} (at least {AIM_HIDDEN:.0%})"
        found.append(Aim(what, min(hidden) >= AIM_HIDDEN))
    return found


def _known(rows: list[dict[str, Any]], column: str, model: str | None = None) -> list[float]:
    return [r[column] for r in rows if r[column] is not None and model in (None, r["model"])]


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
        for tested in report.tests:
            print(f"{tested.name}: {tested.said}", flush=True)
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
    sys.exit(0 if report.passed else 1)


if __name__ == "__main__":
    main()
