"""Each contributor's part of the committed rounds: tokens, time, bytes, and groups of rollouts. Immutable.

A round that the swarm leaves for another chain is taken back, as long as it is one of the last MAX_REVERSIBLE rounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from node.dashboard.events import CommittedContribution, CountedGroups
from protocol.identity import PeerId

MAX_CONTRIBUTORS = 4096  # beyond them, the one with the fewest tokens is forgotten
MAX_REVERSIBLE = 64  # rounds; no peer's log holds more


@dataclass(frozen=True, slots=True)
class Contributed:
    """One peer's contributions; `seconds` is the duration of the rounds that include it, `size` bytes of parts.

    `groups`: of its rollouts, from which trainers learned.
    """

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    size: int = 0
    groups: int = 0

    def plus(self, tokens: int, size: int, groups: int, seconds: float, sign: int = 1) -> "Contributed":
        """Return the sum with one more contribution; a `sign` of -1 takes it back."""
        return Contributed(
            self.tokens + sign * tokens,
            self.rounds + sign,
            max(0.0, self.seconds + sign * seconds),
            self.size + sign * size,
            self.groups + sign * groups,
        )


@dataclass(frozen=True, slots=True)
class IncludedRound:
    """A round's duration, and peer, tokens, bytes and groups of all work; the events themselves take more memory."""

    round: int
    seconds: float
    given: tuple[tuple[PeerId, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Contributors:
    """The sums by peer, and the newest rounds, which a fork may take back."""

    by_peer: Mapping[PeerId, Contributed] = field(default_factory=dict)
    recent: tuple[IncludedRound, ...] = ()

    def of(self, peer: PeerId) -> Contributed:
        return self.by_peer.get(peer, Contributed())

    def add_round(
        self,
        number: int,
        seconds: float,
        given: Sequence[CommittedContribution],
        drawn: Sequence[CountedGroups] = (),
    ) -> "Contributors":
        """Return the sums with one more round."""
        groups = {one.peer: one.groups for one in drawn}
        trained = [(one.peer, one.tokens, one.size, groups.pop(one.peer, 0)) for one in given]
        included = IncludedRound(number, seconds, (*trained, *((peer, 0, 0, count) for peer, count in groups.items())))
        sums = _add(self.by_peer, included, 1)
        while len(sums) > MAX_CONTRIBUTORS:
            del sums[min(sums, key=lambda peer: (sums[peer].tokens, sums[peer].groups))]
        return Contributors(sums, (*self.recent, included)[-MAX_REVERSIBLE:])

    def truncate_from(self, round_number: int) -> "Contributors":
        """Return the sums without this round and later ones."""
        sums: Mapping[PeerId, Contributed] = self.by_peer
        for included in self.recent:
            if included.round >= round_number:
                sums = _add(sums, included, -1)
        kept = tuple(included for included in self.recent if included.round < round_number)
        return Contributors({peer: one for peer, one in sums.items() if one.rounds > 0}, kept)


def _add(sums: Mapping[PeerId, Contributed], included: IncludedRound, sign: int) -> dict[PeerId, Contributed]:
    changed = {
        peer: sums.get(peer, Contributed()).plus(tokens, size, groups, included.seconds, sign)
        for peer, tokens, size, groups in included.given
    }
    return {**sums, **changed}


def mean_seconds(durations: Iterable[float | None]) -> float:
    """Return the mean of the known durations; 0 without any."""
    known = [seconds for seconds in durations if seconds is not None]
    return sum(known) / len(known) if known else 0.0
