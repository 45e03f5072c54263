"""A case as a batch job of `dpipe train`, one process per GPU, and the result of its run."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dpipe.errors import ConfigError
from dpipe.report.metrics import read_rows
from sc21.case import Case
from sc21.rows import Row, row_of

CONFIGURATION = Path(__file__).with_name("gpt.toml")
_WARM_UP = 2  # steps that are left out of the median


@dataclass(frozen=True)
class Site:
    """The variables of CONFIG.sh."""

    partition: str
    account: str
    time: str
    gpus_per_node: int
    dpipe: str
    files: str
    tokenizer: str
    steps: int
    runs: Path


def site(environment: Mapping[str, str]) -> Site:
    """Raises `ConfigError` naming every variable of CONFIG.sh that is empty, or is not a number
    although it must be one.
    """
    texts = {
        name: environment.get(name, "").strip()
        for name in (
            *("SLURM_PARTITION", "SLURM_ACCOUNT", "SLURM_TIME", "GPUS_PER_NODE"),
            *("DPIPE", "DPIPE_FILES", "DPIPE_TOKENIZER", "DPIPE_STEPS", "DPIPE_RUNS"),
        )
    }
    if missing := [name for name, text in texts.items() if not text]:
        raise ConfigError(
            f"scripts/sc21/CONFIG.sh does not set {', '.join(missing)}, which --mode slurm needs"
        )
    for name in ("GPUS_PER_NODE", "DPIPE_STEPS"):
        if not texts[name].isdigit() or texts[name] == "0":
            raise ConfigError(
                f"scripts/sc21/CONFIG.sh: {name} must be a number from 1, got {texts[name]!r}"
            )
    partition, account, time, gpus, dpipe, files, tokenizer, steps, runs = texts.values()
    return Site(
        partition, account, time, int(gpus), dpipe, files, tokenizer, int(steps), Path(runs)
    )


def case_name(experiment: str, case: Case) -> str:
    words = (experiment, case.series, case.x)
    return "-".join(
        "".join(c if c.isalnum() or c in "._" else "-" for c in word) for word in words if word
    )


def overrides(case: Case) -> tuple[str, ...]:
    """The case as overrides of a configuration."""
    parallel = {
        "pipeline.stages": case.pipeline * case.stages_per_rank,
        "pipeline.stages_per_rank": case.stages_per_rank,
        "pipeline.schedule": "1f1b" if case.stages_per_rank == 1 else "interleaved",
        "pipeline.recompute": "full" if case.recompute else "none",
        "train.batch_size": case.batch,
        "train.num_microbatches": case.num_microbatches,
    }
    if case.data > 1:
        parallel |= {
            "data_parallel.kind": "all-reduce",
            "data_parallel.group": "torch",
            "data_parallel.replicas": case.data,
        }
    if case.tensor > 1:
        parallel |= {
            "tensor_parallel.size": case.tensor,
            "tensor_parallel.scatter_gather": case.scatter_gather,
        }
    model = {
        "model.num_layers": case.num_layers,
        "model.width": case.width,
        "model.num_heads": case.num_heads,
    }
    return tuple(f"{key}={json.dumps(value)}" for key, value in (model | parallel).items())


def batch_job(experiment: str, case: Case, site: Site) -> list[str]:
    """The sbatch command. A node runs one process per GPU, or fewer if the case needs fewer."""
    name = case_name(experiment, case)
    settings = (
        *overrides(case),
        f"data.files={json.dumps([site.files])}",
        f"data.tokenizer={json.dumps(site.tokenizer)}",
        f"train.steps={site.steps}",
        f"run.folder={json.dumps(str(site.runs / name))}",
    )
    train = [
        "srun",
        site.dpipe,
        "train",
        str(CONFIGURATION),
        *(word for text in settings for word in ("-o", text)),
    ]
    each = min(case.gpus, site.gpus_per_node)
    return [
        *(
            "sbatch",
            f"--job-name=sc21-{name}",
            f"--partition={site.partition}",
            f"--account={site.account}",
        ),
        *(f"--time={site.time}", f"--nodes={-(-case.gpus // each)}", f"--ntasks={case.gpus}"),
        *(
            f"--ntasks-per-node={each}",
            f"--gres=gpu:{each}",
            "--exclusive",
            f"--wrap={shlex.join(train)}",
        ),
    ]


def measured(experiment: str, case: Case, runs: Path) -> Row | None:
    """The median step of the case's run and the peak of its fullest GPU; None if it has not run."""
    folder = runs / case_name(experiment, case)
    if not (folder / "metrics.jsonl").exists():
        return None
    steps = [row for row in read_rows(folder) if "step_s" in row][_WARM_UP:]
    if not steps:
        return None
    peaks = [peak for row in steps for peak in row.get("gpu_memory_mb", {}).values()]
    return row_of(case, median(row["step_s"] for row in steps), max(peaks) / 1e3 if peaks else None)
