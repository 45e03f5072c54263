"""How a job's layers are counted: by formula, or by running a user's own on shapes."""

from dpipe.config.load import Config
from dpipe.placement.problem import WholeModel
from dpipe.plan.costs import transformer_costs


def whole_model_of(config: Config) -> WholeModel:
    """Raises what loading a user's own model raises."""
    if config.model.is_transformer or not config.model.family.computes:
        return transformer_costs
    from dpipe.plan.own_layers import OwnLayers  # torch, which dpipe's own models need not

    return OwnLayers(config)
