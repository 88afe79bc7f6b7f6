"""How far a round moves that has less behind it than the run's rounds usually have.

A mean of few messages is as long as a mean of many, and noisier. Where the loss hardly falls any more a round of one
peer in eight throws the model back by the work of many rounds; a step in proportion to what is behind it keeps the
noise for each token what it was (linear scaling of the learning rate with the batch, arXiv 1706.02677):

delta <- delta * min(1, W / U)
with W = sum_i w_i of the round's members and U = what is usual, which all peers hold alike:
U <- W in the first round;  U <- U + min(max(W - U, -U / 64), U / 4)

So U follows the great rounds: a swarm that has lost half its peers for good takes whole steps again after 45 rounds. It
rises by a quarter at most, so that one member's lie about its tokens does not shorten the steps after it by more.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

MAX_FALL: Final = np.float32(1 / 64)  # a round, of what is usual
MAX_RISE: Final = np.float32(1 / 4)


def update_reference_weight(weights: Sequence[float], reference: torch.Tensor) -> torch.Tensor:
    """U after a round of these members; before it `usual`, fp32 of one value, zero at the start.

    The same bits on every machine, as those of `share_of`: each operation is one in fp32.
    """
    weight, before = _total_weight(weights), np.float32(reference.item())
    after = before + min(max(weight - before, -before * MAX_FALL), before * MAX_RISE) if before else weight
    return torch.from_numpy(np.array([after]))


def compute_step_scale(weights: Sequence[float], reference: torch.Tensor) -> float:
    """Of a whole step, in 0 to 1, that such a round makes. `usual`: U after it."""
    return float(min(np.float32(1), _total_weight(weights) / np.float32(reference.item())))


def _total_weight(weights: Sequence[float]) -> np.float32:
    return np.float32(math.fsum(weights))
