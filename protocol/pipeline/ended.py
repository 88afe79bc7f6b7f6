"""Ended microbatches: where their gradients count, and how many of these die with their servers.

A server's gradients are lost if it dies, or its trainer, before they are in a contribution. Owners do not see
contributions, so they count by rounds: a gradient that a server had in round r is in its contribution to r or, if that
was sent before, in the one to r + 1. Records may be a round late.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from protocol.identity import PeerId
from protocol.pipeline.course import Place
from protocol.pipeline.routing import StagePeer

REMEMBERED = 1024  # microbatches, to recognise late outcomes
UNSAFE_ROUNDS = 3


class EndedMicrobatches:
    """The ended microbatches of one owner."""

    def __init__(self) -> None:
        self._added: OrderedDict[int, dict[int, Place]] = OrderedDict()
        self._unsafe: dict[tuple[int, PeerId, int], Counter[int]] = {}  # by stage, peer and life: gradients by round
        self._rounds: dict[tuple[int, PeerId], int] = {}

    def add(self, serial: int, added: dict[int, Place], lost: Collection[int]) -> None:
        """Remember where gradients count, by stage; those of the `lost` stages are counted already."""
        self._added[serial] = added
        if len(self._added) > REMEMBERED:
            self._added.popitem(last=False)
        for stage, place in added.items():
            if stage not in lost:
                server = stage, place.peer, place.life
                self._unsafe.setdefault(server, Counter())[self._rounds.get((stage, place.peer), 0)] += 1

    def places(self, serial: int) -> Mapping[int, Place]:
        """Return where the gradients of a microbatch count, by stage."""
        return self._added.get(serial, {})

    def update(self, stages: Sequence[Iterable[StagePeer]]) -> int:
        """Take over the live peers of all stages; return how many gradients have been lost, at most."""
        entries = {(stage, entry.peer): entry for stage, peers in enumerate(stages) for entry in peers}
        self._rounds = {place: entry.round for place, entry in entries.items()}
        lives = {place: entry.life for place, entry in entries.items()}
        gone = [server for server in self._unsafe if lives.get(server[:2], server[2] + 1) > server[2]]
        lost = sum(self._unsafe.pop(server).total() for server in gone)
        for server, gradients in self._unsafe.items():
            safe = entries[server[:2]].round - UNSAFE_ROUNDS
            self._unsafe[server] = Counter({number: count for number, count in gradients.items() if number > safe})
        return lost
