"""Tables of rotary positions (arXiv 2104.09864), with the scalings that models with long contexts have.

Linear scaling (2306.15595) divides all frequencies. Llama 3.1 and YaRN (2309.00071) divide those that turn less than
once in the original context, keep those that turn often, and interpolate between the two.
"""

import math

import torch
from torch import Tensor

from protocol.manifest.model import ModelSection, RopeScaling


def rotary_tables(config: ModelSection) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (context, D/2) of position * frequency, in fp32."""
    half = config.head_width // 2
    frequencies = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    scaling = config.rope_scaling
    if scaling is not None:
        frequencies = scaled(frequencies, config.rope_theta, scaling)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float64), frequencies)
    length = 1.0 if scaling is None else length_factor(scaling)
    return (angles.cos() * length).float(), (angles.sin() * length).float()


def scaled(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the frequencies (D/2,) after scaling, in fp64."""
    match scaling.rope_type:
        case "linear":
            kept = torch.zeros_like(frequencies)
        case "llama3":
            kept = _kept_by_turns(frequencies, scaling)
        case "yarn":
            kept = _kept_by_index(len(frequencies), theta, scaling)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def length_factor(scaling: RopeScaling) -> float:
    """Return the factor of queries and keys that YaRN adds; 1 for the others."""
    if scaling.rope_type != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


def _kept_by_turns(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return for each frequency how much of it Llama 3.1 keeps: 1 if it turns often in the original context."""
    low, high = scaling.low_freq_factor or 0.0, scaling.high_freq_factor or 0.0
    turns = (scaling.original_max_position_embeddings or 0) * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _kept_by_index(half: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return for each frequency how much of it YaRN keeps: a ramp over the index, between two numbers of turns."""

    def index_of(turns: float) -> float:
        length = scaling.original_max_position_embeddings or 0
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index_of(scaling.beta_fast or 32.0), index_of(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first if first != last else 0.001
    return 1 - ((torch.arange(half, dtype=torch.float64) - first) / width).clamp(0, 1)
