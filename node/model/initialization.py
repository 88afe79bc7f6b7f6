"""Initial weights that are bit-equal on every machine.

All peers of a run must start from the same anchor, whatever their processor, library build or number of threads. So
each parameter has a random stream of its own. The model family gives mean and standard deviation.
"""

import torch
from torch import Tensor

from node.model.adapter import first_factors
from node.model.families import model_family, shape_table
from node.model.random_values import fill_bell_curve, stream_of
from node.model.shapes import WHOLE, Cut
from protocol.manifest.model import ModelSection


def initial_weights(config: ModelSection, seed: int, cut: Cut = WHOLE) -> Tensor:
    """Return the weights of round 0, of the model or of a stage: a flat fp32 vector (numel,) on the CPU.

    They depend on names, shapes and the seed only, so those of a stage are a slice of the whole model's.
    """
    family, table = model_family(config), shape_table(config, cut)
    flat = torch.empty(table.numel)
    for entry, view in zip(table.entries, table.views(flat).values(), strict=True):
        mean, deviation = first_factors(entry) if config.adapter is not None else family.first_values(config, entry)
        if deviation:
            fill_bell_curve(view.view(-1), deviation, stream_of(f"murmur initial 1 {seed} {entry[0]}"))
        else:
            view.fill_(mean)
    return flat
