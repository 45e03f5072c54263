"""Folders of runs as a run writes them, made in a moment."""

import json
from pathlib import Path
from typing import Any

from dpipe.config.load import Config, build

MACHINES = """
name = "two sites"
[[machine]]
name = "oslo"
memory_gb = 2
price_per_hour = 3.6
[[machine]]
name = "porto"
memory_gb = 1
price_per_hour = 7.2
[[link]]
from = "oslo"
to = "porto"
delay_ms = 20
bandwidth_gbps = 0.1
"""


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    """Two stages of two layers each, on two machines."""
    machines = folder.parent / "machines.toml"
    machines.write_text(MACHINES)
    table: dict[str, Any] = {
        "model": {"num_layers": 4, "width": 16, "num_heads": 2, "context": 16},
        "data": {"files": ["text.txt"], "tokenizer": "bytes"},
        "train": {"steps": 10, "batch_size": 4, "num_microbatches": 2},
        "pipeline": {"stages": 2, "schedule": "1f1b", "split": [3, 3]},
        "transport": {"shape": str(machines)},
        "run": {"folder": str(folder)},
    }
    for name, section in sections.items():
        table.setdefault(name, {}).update(section)
    return build(table)


def write_config(folder: Path, **sections: dict[str, Any]) -> Config:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    config = config_of(folder, **sections)
    table = config.model_dump(mode="json", exclude={"node"})
    (folder / "config.json").write_text(json.dumps(table))
    return config


def row(step: int, **values: Any) -> dict[str, Any]:
    """As `engine/trainer.py` writes it."""
    return {
        "step": step,
        "loss": 4.0 - step / 10,
        "step_s": 0.5,
        "tokens_per_s": 128.0,
        "bubble": 0.25,
        "mb_per_s": {"0->1": 10.0, "1->0": 5.0},
        "memory_mb": {"0": 500.0, "1": 600.0},
        **values,
    }


def append(folder: Path, *rows: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)
