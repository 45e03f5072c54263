"""What the layers of a user's own model take and hold, for a search that asks about many sizes of
micro-batches: each is counted once.
"""

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

from dpipe.config.load import Config
from dpipe.memory.walk import StageMemory
from dpipe.plan.costs import LayerCosts
from dpipe.plan.run_plan import DTYPES, first_inputs, layer_costs, make_model, stage_runner
from dpipe.probe.layer_costs import LayerCost, probe
from dpipe.probe.measured import measured_stages


class OwnLayers:
    """Called with a configuration, it returns what `transformer_costs` does for a family that is
    counted by formula.
    """

    def __init__(self, config: Config) -> None:
        """Raises what `make_model` raises."""
        self._model = make_model(config)
        self._probed: dict[int, tuple[LayerCost, ...]] = {}
        self._measured: dict[Hashable, StageMemory] = {}

    def __call__(self, config: Config) -> LayerCosts:
        size = config.microbatch_size
        if size not in self._probed:
            stored = DTYPES[config.train.parameters]
            inputs = first_inputs(config)
            self._probed[size] = probe(self._model, inputs, config.train.seed, stored)
        probed = self._probed[size]
        layers = layer_costs(config, self._model, probed, None)
        runner = stage_runner(config, self._model)
        runner = replace(runner, known=self._measured)
        return replace(layers, memory_of=partial(measured_stages, runner, probed))
