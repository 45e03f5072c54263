"""The MFU in the rows of metrics."""

import torch

from dpipe.config.load import Config
from dpipe.plan.costs import layer_flops
from dpipe.stage.efficiency import mfu, peak_of, train_flops


def utilisation(config: Config, device: torch.device, seconds: float) -> float | None:
    """MFU of a step that took `seconds`; None for a user's own model, and on a device whose peak is
    unknown.
    """
    if device.type != "cuda" or not config.model.is_transformer:
        return None
    peak = peak_of(torch.cuda.get_device_name(device))
    if peak is None:
        return None
    flops = train_flops(layer_flops(config, config.train.batch_size))
    return mfu(flops, seconds, peak, config.train.precision, config.world_size)
