"""PURE: the fire drill of a local swarm: half-way one peer is killed; the others go on; then it returns."""

from dataclasses import dataclass
from typing import Literal

from node.local.views import PeerView, SwarmView
from node.status import plural

RETURN_DEADLINE = 60.0  # seconds; others that cannot go on alone get the victim back
ROUNDS_ALONE = 1  # committed without the victim before it returns, if the others have noticed its absence
ROUNDS_UNNOTICED = 3  # the same if its record has not expired yet
ROUNDS_TO_SHOW = 3  # left at the end, so that it can still take part


@dataclass(frozen=True)
class Order:
    """What to do to the victim, and the line that says so."""

    action: Literal["kill", "start", "none"]
    text: str


class Drill:
    """The victim is the last peer: the first is the one that the others were introduced by."""

    def __init__(self, peers: int) -> None:
        self._victim = peers - 1
        self._stage: Literal["armed", "lost", "returning", "over"] = "armed"
        self._round = 0  # of the others when the stage began
        self._since = 0.0

    @property
    def lost(self) -> int:
        return int(self._stage != "armed")

    @property
    def rejoined(self) -> int:
        return int(self._stage == "over")

    def decide(self, view: SwarmView) -> Order | None:
        """Called with every new view."""
        victim = view.peers[self._victim]
        others = view.peers[: self._victim]
        if self._stage == "armed":
            return self._strike(view, victim)
        if self._stage == "lost":
            return self._return(view, victim, others)
        if self._stage == "returning":
            return self._welcome(victim, others)
        return None

    def _strike(self, view: SwarmView, victim: PeerView) -> Order | None:
        if view.progress < 0.5 or victim.state != "running" or not self._victim:
            return None
        self._enter("lost", view)
        return Order("kill", f"drill: {victim.name} is killed in round {view.round}")

    def _return(self, view: SwarmView, victim: PeerView, others: tuple[PeerView, ...]) -> Order | None:
        alone = min(peer.round for peer in others) - self._round
        noticed = all(peer.status and peer.status.peers <= len(others) for peer in others)
        left = view.target_rounds - view.round if view.target_rounds else ROUNDS_TO_SHOW + 1
        enough = alone >= (ROUNDS_ALONE if noticed or left <= ROUNDS_TO_SHOW else ROUNDS_UNNOTICED)
        late = view.elapsed - self._since > RETURN_DEADLINE
        if not (enough or late):
            return None
        self._enter("returning", view)
        went = f"the others finished {plural(alone, 'round')} without it" if enough else "the others wait"
        return Order("start", f"drill: {went}; {victim.name} is started again")

    def _welcome(self, victim: PeerView, others: tuple[PeerView, ...]) -> Order | None:
        status = victim.status
        if status is None or status.last_included_round is None or status.last_included_round < self._round:
            return None
        # Rounds of its own after the others have gone are no return: it must stand where one of them stands.
        beside = (peer.status for peer in others if peer.status and peer.status.round == status.round)
        if not any(other.digest == status.digest for other in beside):
            return None
        self._stage = "over"
        return Order("none", f"drill: {victim.name} is back in round {status.round} and contributes")

    def _enter(self, stage: Literal["lost", "returning"], view: SwarmView) -> None:
        self._stage = stage
        self._round = view.round
        self._since = view.elapsed
