"""dpipe: pipeline-parallel training over slow, uneven networks.

The rooms, from the ground up; imports point down only (`tests/test_architecture.py` holds them):

    front door    cli            parses, then calls one function
    comparison    bench          two ways in one run, and their ratio
                  baselines      other engines on our configuration
    onlookers     watch          a run as it goes, on a page, in a terminal, in a report
                  serve          a parameter server as a process of its own
                  supervisor     machines that are processes: started, watched, replaced
    composition   agent          a machine of an elastic run, and who coordinates them
                  epoch          a rank's part of a run whose machines come and go
                  run            a configuration becomes ranks that train
                  processes      which rank a process is, and starting them all
    training      engine         the loop: executor, recorder, update, trainer
                  measure        what machines and links are, before a run
                  report         metrics, what a person sees, the trace of a run
                  planner        unequal machines: what is best there, and why
                  placement      which of them holds which layers
                  plan           before a run: what it takes, where to cut the model
                  probe          what the layers of any model take and hold, tried
                  memory         what each rank will hold
                  data           texts, samples, batches
                  tokenizer      texts to token ids, and back
                  export         a trained model for other programs, and how it does at tasks
                  hub            published models: transformers' modules, their weights
                  keeper         copies of layers in memory, kept and served
                  terms          who coordinates an elastic run, of several that could
                  store          checkpoints and the folder of a run
                  search         "auto": the best order on a network, the format of each link
    specialists   timeline       when a step's actions happen, predicted or measured
                  stage          a slice of the model on one device
                  quantised      matrices that do not learn, in few bits
                  passes         a layer's passes in slices, split, or run again
                  transport      moving a tensor to another rank
                  session        the bytes that carry it, over connections that break
                  relay          links of ranks that cannot dial each other
                  trackers       W&B, MLflow, OpenTelemetry
                  optimizers     how parameters step by their gradients
                  dataparallel   how replicas agree
                  paramworker    how they agree through a server
                  paramserver    that server
                  coordinator    who is there
                  elastic        machines that come and go, epoch by epoch
    configuration convert        other trainers' settings as ours
                  config         every setting, from TOML
    alphabets     machines       what each machine is, and the links between them
                  schedule       what runs where in which order
                  wire           bytes: formats, messages
                  network        links and their delays and bandwidths
    ground        choices  disk  errors  ranks  streams  toml

What `__all__` names is public. To plan and to predict a step takes no torch:

    from dpipe import Cost, Network, generate, simulate

    simulate(generate("1f1b", 4, 8), Cost.uniform(4, 1e4, 2e4, 1_000_000), Network()).step_us

To train takes a configuration, a file or one made here:

    import dpipe

    config = dpipe.load("job.toml", ("train.steps=50",))
    folder = dpipe.launch(config, on_row=print)    # all ranks, as processes of this machine
    dpipe.train(config, rank=1, world_size=2, coordinator="10.0.0.1:7000")    # one rank, here
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpipe.config.load import Config, load
    from dpipe.errors import DpipeError, InputError, RunError
    from dpipe.network.link import Link, Network
    from dpipe.network.profile import load_network
    from dpipe.run.api import launch, train
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
    "InputError",
    "Link",
    "Network",
    "Op",
    "RunError",
    "Schedule",
    "Span",
    "Timeline",
    "check",
    "generate",
    "launch",
    "load",
    "load_network",
    "lower",
    "simulate",
    "train",
]
_HOMES = {
    "config.load": ("Config", "load"),
    "errors": ("DpipeError", "InputError", "RunError"),
    "network.link": ("Link", "Network"),
    "network.profile": ("load_network",),
    "run.api": ("launch", "train"),
    "schedule.action": ("Action", "Op"),
    "schedule.check": ("check",),
    "schedule.generate": ("generate",),
    "schedule.lower": ("lower",),
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
