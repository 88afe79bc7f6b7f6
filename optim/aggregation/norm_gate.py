"""Refuse contributions whose norm is far above the usual one, so that no message moves the model by more than another.

All peers share the usual norm U of a contribution, one for each kind of round (fragments and periods differ):

    M = the lower median of the norms |x_i| > 0 of a round
    refused where |x_i| > gate * (U, or M while U is not known), or the root mean square of x_i is above 1024
    U <- M in the first round;  U <- min(max(M, U - U / 8), 2 U)

Norms change over a run, most of all while the learning rate warms up, and U follows them within a few rounds. If all
contributions of a round are above the gate, the round's mean is scaled down to U instead: a jump that all peers made
together delays a run by a few short steps, and a liar that is alone in a round gains nothing.

A reducer of a butterfly judges the norms of its part by their lower median, without U, so that a sum follows from the
contributions alone. All peers then limit the sum of the round: U is the usual norm of sums, and a sum above gate * U is
scaled down to U.
"""

import math
from collections.abc import Sequence
from statistics import median_low
from typing import Final

import numpy as np

MAX_FALL: Final = 1 / 8  # per round, as a fraction of U
MAX_RISE: Final = 2.0
MAX_RMS: Final = 1024.0  # of progress, gradients or weights; codecs accept values up to 2^47
MAX_USUAL_NORM: Final = 1e30


def update_usual_norm(norms: Sequence[float], usual: float) -> float:
    """Return U after a round with these norms, as an fp32: the same on every machine."""
    known = [norm for norm in norms if norm > 0]
    if not known:
        return usual
    middle = median_low(known)
    after = min(max(middle, usual * (1 - MAX_FALL)), usual * MAX_RISE) if usual else middle
    return float(np.float32(min(after, MAX_USUAL_NORM)))


def norm_limit(norms: Sequence[float], usual: float, gate: float, numel: int) -> float:
    """Return the largest norm of `numel` values that passes; `usual` is U before the round, 0 if it is not known."""
    return min(gate * (usual or update_usual_norm(norms, 0.0)), MAX_RMS * math.sqrt(numel))


def limit_scale(norm: float, usual: float, limit: float) -> float:
    """Return the factor that scales a norm above the limit down to `usual`, to 0 if that is not known; else 1."""
    return float(np.float32(usual / norm)) if norm > limit else 1.0
