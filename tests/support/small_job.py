"""A job that trains a step in some milliseconds: a GPT of four layers on a short text. It keeps no
trace, whose prediction would take a third of such a run.
"""

import json
from collections.abc import Mapping
from typing import Any

TEXT = (
    "The quick brown fox jumps over the lazy dog, and nobody knows why it never gets tired of it. "
    * 60
)
SMALL_JOB: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "width": 16, "num_heads": 2, "context": 16},
    "data": {"files": ["text.txt"], "held_out": 0.1},
    "train": {"batch_size": 8, "num_microbatches": 4},
    "run": {"tensorboard": False, "trace_steps": 0},
    "timeouts": {"join": 60},
}


def small_job(**changes: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """SMALL_JOB with keys added or replaced, by section."""
    sections = [*SMALL_JOB, *(section for section in changes if section not in SMALL_JOB)]
    return {
        section: {**SMALL_JOB.get(section, {}), **changes.get(section, {})} for section in sections
    }


def small_toml(**changes: Mapping[str, object]) -> str:
    """The same as the text of a configuration."""
    lines = []
    for section, keys in small_job(**changes).items():
        lines.append(f"[{section}]")
        # These strings, numbers, booleans and lists read alike in JSON and TOML.
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(lines)
