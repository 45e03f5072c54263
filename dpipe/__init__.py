"""dpipe: pipeline-parallel training over slow, uneven networks.

The rooms, from the ground up; arrows point down only (`tests/test_architecture.py` holds them):

    front door   cli
    comparison   baselines
    coordinator      engine        executor, recorder, trainer, checkpoint, launch
    specialists  timeline (when)  stage (a slice of the model)  transport (moving a tensor)
                 dataparallel (replicas agree)  coordinator (who is there)
    alphabets    schedule (what runs where in which order)  wire (bytes)
    ground       config  parallelism  presets  topology  streams  errors

What `__all__` names is public: to plan a step and to predict it, without torch. A run is the
command line's.

    from dpipe import Cost, Network, generate, simulate

    simulate(generate("1f1b", 4, 8), Cost.uniform(4, 1e4, 2e4, 1_000_000), Network()).duration_us
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpipe.config.load import Config
    from dpipe.errors import DpipeError
    from dpipe.network.link import Link, Network
    from dpipe.network.profile import load_network
    from dpipe.schedule.action import Action, Op
    from dpipe.schedule.check import check
    from dpipe.schedule.generate import generate
    from dpipe.schedule.lower import lower
    from dpipe.schedule.schedule import Schedule
    from dpipe.timeline.cost import Cost
    from dpipe.timeline.simulate import simulate
    from dpipe.timeline.span import Span, Timeline

__version__ = "0.1.0"
__all__ = [
    "Action",
    "Config",
    "Cost",
    "DpipeError",
    "Link",
    "Network",
    "Op",
    "Schedule",
    "Span",
    "Timeline",
    "check",
    "generate",
    "load_network",
    "lower",
    "simulate",
]
_HOMES = {
    "config.load": ("Config",),
    "errors": ("DpipeError",),
    "schedule.action": ("Action", "Op"),
    "schedule.check": ("check",),
    "schedule.generate": ("generate",),
    "schedule.lower": ("lower",),
    "network.link": ("Link", "Network"),
    "network.profile": ("load_network",),
    "schedule.schedule": ("Schedule",),
    "timeline.cost": ("Cost",),
    "timeline.simulate": ("simulate",),
    "timeline.span": ("Span", "Timeline"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: a room must not cost the import of all others."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"dpipe.{home}"), name)
    raise AttributeError(f"module 'dpipe' has no attribute {name!r}")
