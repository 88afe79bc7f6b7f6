"""Credit rollout peers in the contributions of the trainers that learned from their groups, and count it by commits.

A contribution names for each maker the groups that its steps learned from, and their tokens. Its trainer signs this,
and a commit that includes it certifies it. So a maker's own word counts for nothing: receipts follow from commits.

A trainer may still lie, for itself under another key as well. So a contribution credits

    tokens    no more than it claims itself, of which a commit counts at most twice the lower median (`messages`)
    groups    no more than the steps of a round can take, and at most twice the lower median of the contributions that
              credit any

and a claim that is cut counts for each maker in proportion. One liar next to k honest trainers of equal speed hands out
at most 2 of the k + 2 parts, and withholds at most the groups that were its own to learn.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Final, NamedTuple

from protocol import murmur_pb2 as wire
from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId, public_key

MAX_CREDITS: Final = 256  # makers in one contribution


class RolloutCredit(NamedTuple):
    """The groups of one maker that steps learned from, and the tokens of their answers."""

    maker: PeerId
    groups: int
    tokens: int

    def to_wire(self) -> wire.RolloutCredit:
        return wire.RolloutCredit(maker=self.maker, groups=self.groups, tokens=self.tokens)


Credits = tuple[RolloutCredit, ...]


def add_credits(*lists: Iterable[RolloutCredit]) -> Credits:
    """Add up credits by maker, in ascending order; those that are below 1 are left out."""
    sums = dict[PeerId, RolloutCredit]()
    for maker, groups, tokens in chain.from_iterable(lists):
        known = sums.get(maker, RolloutCredit(maker, 0, 0))
        sums[maker] = RolloutCredit(maker, known.groups + groups, known.tokens + tokens)
    return tuple(sums[maker] for maker in sorted(sums) if sums[maker].groups > 0 and sums[maker].tokens > 0)


def subtract_credits(credited: Credits, less: Credits) -> Credits:
    """Return credits without those of another list."""
    return add_credits(credited, (RolloutCredit(maker, -groups, -tokens) for maker, groups, tokens in less))


def scale_credits(credited: Sequence[RolloutCredit], groups: int, tokens: int) -> Credits:
    """Return credits cut in proportion, whose sums are at most these numbers."""
    all_groups, all_tokens = sum(each.groups for each in credited), sum(each.tokens for each in credited)
    cut = []
    for maker, own_groups, own_tokens in credited:
        kept = _scale(own_tokens, tokens, all_tokens)
        cut.append(RolloutCredit(maker, min(_scale(own_groups, groups, all_groups), kept), kept))
    return tuple(each for each in cut if each.groups)


def _scale(value: int, limit: int, total: int) -> int:
    return value if total <= limit else value * limit // total


def choose_credits(credited: Iterable[RolloutCredit], groups: int, tokens: int) -> Credits:
    """Return the credits that an honest contribution with these tokens may name: of the makers with most of them."""
    largest = sorted(credited, key=lambda each: (-each.tokens, each.maker))[:MAX_CREDITS]
    return scale_credits(sorted(largest), groups, tokens)


def open_credits(body: wire.Contribution, most_groups: int | None) -> Credits:
    """Check the credits of a contribution.

    Raises MalformedError or LimitError. `most_groups`: of one contribution; `None` if any number will do.
    """
    credited = tuple(RolloutCredit(each.maker, each.groups, each.tokens) for each in body.credits)
    if len(credited) > MAX_CREDITS:
        raise LimitError(
            f"a contribution that credits {len(credited)} makers of rollouts, at most {MAX_CREDITS} may be"
        )
    makers = [each.maker for each in credited]
    if any(first >= second for first, second in pairwise(makers)):
        raise MalformedError("a contribution whose credits are not in ascending order of their makers")
    for each in credited:
        public_key(each.maker)
    if any(not 1 <= each.groups <= each.tokens for each in credited):
        raise MalformedError("a contribution that credits groups without tokens")
    if sum(each.tokens for each in credited) > body.tokens:
        raise MalformedError("a contribution that credits more tokens of rollouts than it has")
    if most_groups is not None and sum(each.groups for each in credited) > most_groups:
        raise LimitError(f"a contribution that credits more than {most_groups} groups of rollouts")
    return credited


class ClaimedCredits(NamedTuple):
    """The credits of one contribution to a commit, the tokens that it claims, and those that the commit counts."""

    credits: Credits
    claimed: int
    counted: int


def count_credits(claims: Sequence[ClaimedCredits], count: Callable[[Sequence[int]], list[int]]) -> list[Credits]:
    """Return the credits that each contribution of a commit counts for, given those of all of them.

    `count` cuts claims by their median.
    """
    crediting = [place for place, each in enumerate(claims) if each.credits]
    if not crediting:
        return [() for _ in claims]
    groups = dict(zip(crediting, count([_groups_of(claims[place].credits) for place in crediting]), strict=True))
    return [
        scale_credits(each.credits, groups.get(place, 0), _counted_tokens_of(each)) for place, each in enumerate(claims)
    ]


def _groups_of(credited: Credits) -> int:
    return sum(each.groups for each in credited)


def _counted_tokens_of(claim: ClaimedCredits) -> int:
    """Return the tokens of credits that count: the same share of them as of the whole claim."""
    return sum(each.tokens for each in claim.credits) * claim.counted // claim.claimed
