"""The number of tokens that a contribution counts for, which bounds what a peer can claim.

The number of tokens is a peer's own claim. It decides the weight in the mean, the length of the chain, the target and
the receipts, so all of them use one number:

    counted = min(claimed, 2 x the lower median of the claims in the commit)

It follows from the commit alone: all peers compute the same, and a certificate of the commit covers it. While most
contributions of a round are honest, the median is an honest claim. A claim of more than twice the plan of a round is
refused when it arrives (`ContributionLimits.max_tokens`), which also bounds a peer that is alone in a commit.

No peer compares a claim with its own clock: a contribution that travelled for long and the next one arrive close
together, so an honest peer behind a bad link would look too fast, and peers that disagree about it could not commit.
"""

from collections.abc import Sequence
from statistics import median_low
from typing import Final

MAX_MULTIPLE: Final = 2  # of the median claim of a round, and of the tokens of a round's plan


def count_tokens(claims: Sequence[int]) -> list[int]:
    """Return the tokens that each contribution of a commit counts for, given the claims of all of them."""
    limit = MAX_MULTIPLE * median_low(claims)
    return [min(claim, limit) for claim in claims]
