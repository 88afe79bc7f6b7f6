"""PURE: what `murmur up` sees of its peers at one moment, and how far the run is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from node.monitoring.status import COMPUTE_ACTIVITIES, NodeStatus, sum_seconds

PeerProcessState = Literal["starting", "running", "lost", "ended"]


@dataclass(frozen=True)
class PeerSummary:
    """One peer process. `status` is the last it told in its present life; `sent`: bytes in all its lives."""

    name: str
    state: PeerProcessState
    status: NodeStatus | None
    bytes_sent: int = 0

    @property
    def state_word(self) -> str:
        if self.state != "running" or self.status is None:
            return self.state
        return "paused" if self.status.paused else self.status.phase

    @property
    def round(self) -> int:
        return self.status.round if self.status else 0


@dataclass(frozen=True)
class SwarmSummary:
    """All peers of this machine. `elapsed` in seconds since the start of the swarm."""

    run: str
    target_rounds: int | None
    target_tokens: int | None
    elapsed: float
    peers: tuple[PeerSummary, ...]

    @property
    def running_peers(self) -> tuple[PeerSummary, ...]:
        return tuple(peer for peer in self.peers if peer.state == "running")

    @property
    def round(self) -> int:
        return max((peer.round for peer in self.peers), default=0)

    @property
    def tokens(self) -> int:
        return max((peer.status.chain_tokens for peer in self.peers if peer.status), default=0)

    @property
    def progress(self) -> float:
        """0 to 1: the nearer of the two targets."""
        rounds = self.round / self.target_rounds if self.target_rounds else 0.0
        tokens = self.tokens / self.target_tokens if self.target_tokens else 0.0
        return min(1.0, max(rounds, tokens))


class RemainingTime:
    """Estimates the seconds left from the pace since the first progress seen (a resumed run starts half-way)."""

    def __init__(self) -> None:
        self._first_progress: tuple[float, float] | None = None

    def estimate(self, swarm: SwarmSummary) -> float | None:
        if not swarm.progress:
            return None
        if self._first_progress is None:
            self._first_progress = (swarm.elapsed, swarm.progress)
        seconds, gained = swarm.elapsed - self._first_progress[0], swarm.progress - self._first_progress[1]
        return seconds * (1 - swarm.progress) / gained if gained > 0 else None


@dataclass
class PeerTotals:
    """What one peer has done over all its lives in this swarm: the last status of each, by its start time."""

    status_by_start: dict[float, NodeStatus]

    def record(self, status: NodeStatus) -> None:
        self.status_by_start[status.since] = status

    @property
    def bytes_sent(self) -> int:
        return sum(status.bytes_sent for status in self.status_by_start.values())

    def newest_seconds(self) -> dict[str, float]:
        """Of the newest life that told any: a trainer goes on counting where the life before it was saved."""
        told = {since: status.seconds for since, status in self.status_by_start.items() if status.seconds}
        return dict(told[max(told)]) if told else {}


def compute_share(peer_totals: Sequence[PeerTotals]) -> float | None:
    """Seconds at the model, training or measuring it, over all seconds that the trainers accounted for."""
    sums = [ledger.newest_seconds() for ledger in peer_totals]
    whole = sum(sum(seconds.values()) for seconds in sums)
    return sum(sum_seconds(seconds, *COMPUTE_ACTIVITIES) for seconds in sums) / whole if whole else None
