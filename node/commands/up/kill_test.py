"""The kill test of a local swarm: half-way one peer is killed, the others continue, then it returns. Pure."""

from dataclasses import dataclass
from typing import Literal

from node.commands.up.swarm_summary import PeerSummary, SwarmSummary
from node.units import format_plural

RESTART_AFTER_SECONDS = 60.0  # restart the victim anyway if the others cannot continue without it
ROUNDS_ALONE = 1  # rounds without the victim before it returns, if the others have noticed its absence
ROUNDS_UNNOTICED = 3  # the same if the victim's record has not expired yet
MIN_ROUNDS_LEFT = 3  # restart the victim while it can still take part in this many rounds


@dataclass(frozen=True)
class KillTestAction:
    """An action on the victim and the line that announces it."""

    action: Literal["kill", "start", "none"]
    text: str


class KillTest:
    """The state machine of the kill test.

    The victim is the last peer, because the others bootstrap from the first one.
    """

    def __init__(self, peers: int) -> None:
        self._victim = peers - 1
        self._stage: Literal["armed", "lost", "returning", "over"] = "armed"
        self._stage_round = 0  # the round of the others when the stage began
        self._stage_started = 0.0

    @property
    def lost_count(self) -> int:
        return int(self._stage != "armed")

    @property
    def rejoined_count(self) -> int:
        return int(self._stage == "over")

    def next_action(self, swarm: SwarmSummary) -> KillTestAction | None:
        """Return the next action for a new summary of the swarm, or `None`."""
        victim = swarm.peers[self._victim]
        others = swarm.peers[: self._victim]
        if self._stage == "armed":
            return self._kill_half_way(swarm, victim)
        if self._stage == "lost":
            return self._restart_when_due(swarm, victim, others)
        if self._stage == "returning":
            return self._confirm_rejoined(victim, others)
        return None

    def _kill_half_way(self, swarm: SwarmSummary, victim: PeerSummary) -> KillTestAction | None:
        if swarm.progress < 0.5 or victim.state != "running" or not self._victim:
            return None
        self._enter_stage("lost", swarm)
        return KillTestAction("kill", f"drill: killed {victim.name} in round {swarm.round}")

    def _restart_when_due(
        self, swarm: SwarmSummary, victim: PeerSummary, others: tuple[PeerSummary, ...]
    ) -> KillTestAction | None:
        alone = min(peer.round for peer in others) - self._stage_round
        noticed = all(peer.status and peer.status.peers <= len(others) for peer in others)
        left = swarm.target_rounds - swarm.round if swarm.target_rounds else MIN_ROUNDS_LEFT + 1
        enough = alone >= (ROUNDS_ALONE if noticed or left <= MIN_ROUNDS_LEFT else ROUNDS_UNNOTICED)
        late = swarm.elapsed - self._stage_started > RESTART_AFTER_SECONDS
        if not (enough or late):
            return None
        self._enter_stage("returning", swarm)
        reason = f"the others finished {format_plural(alone, 'round')} without it" if enough else "the others wait"
        return KillTestAction("start", f"drill: {reason}; restarting {victim.name}")

    def _confirm_rejoined(self, victim: PeerSummary, others: tuple[PeerSummary, ...]) -> KillTestAction | None:
        status = victim.status
        if status is None or status.last_included_round is None or status.last_included_round < self._stage_round:
            return None
        # Rounds that it commits alone after the others have ended do not count: its state must equal another peer's.
        at_same_round = (peer.status for peer in others if peer.status and peer.status.round == status.round)
        if not any(other.digest == status.digest for other in at_same_round):
            return None
        self._stage = "over"
        return KillTestAction("none", f"drill: {victim.name} is back in round {status.round} and contributes")

    def _enter_stage(self, stage: Literal["lost", "returning"], swarm: SwarmSummary) -> None:
        self._stage = stage
        self._stage_round = swarm.round
        self._stage_started = swarm.elapsed
