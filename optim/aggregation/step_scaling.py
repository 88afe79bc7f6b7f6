"""Scale the step of a round by its weight, compared with the weight that the run's rounds usually have.

A mean of few contributions is as long as a mean of many, but noisier. Once the loss hardly falls any more, a round of
one peer in eight would throw the model back by the work of many rounds. A step in proportion to the weight keeps the
noise per token constant (linear scaling of the learning rate with the batch, arXiv 1706.02677):

    delta <- delta * min(1, W / U)

where W = sum_i w_i over the round's members and U is the reference weight, which all peers share:

    U <- W in the first round;  U <- U + min(max(W - U, -U / 64), U / 4)

So U follows the largest rounds: a swarm that has lost half its peers for good takes full steps again after 45 rounds. U
rises by at most a quarter, so that a member's false claim of tokens shortens the following steps by no more than that.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

MAX_FALL: Final = np.float32(1 / 64)  # per round, as a fraction of U
MAX_RISE: Final = np.float32(1 / 4)


def update_reference_weight(weights: Sequence[float], reference: torch.Tensor) -> torch.Tensor:
    """Return U after a round, to the same bits on every machine: each operation is a single one in fp32.

    Args:
        weights: the weights of the round's members.
        reference: U before the round, fp32 of one value, zero at the start.
    """
    weight, before = _total_weight(weights), np.float32(reference.item())
    after = before + min(max(weight - before, -before * MAX_FALL), before * MAX_RISE) if before else weight
    return torch.from_numpy(np.array([after]))


def compute_step_scale(weights: Sequence[float], reference: torch.Tensor) -> float:
    """Return the fraction of a full step to take, in 0 to 1; `reference` is U after the round."""
    return float(min(np.float32(1), _total_weight(weights) / np.float32(reference.item())))


def _total_weight(weights: Sequence[float]) -> np.float32:
    return np.float32(math.fsum(weights))
