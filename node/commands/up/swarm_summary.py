"""The peers of `murmur up` at one moment, and the progress of the run. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from node.monitoring.status import COMPUTE_ACTIVITIES, NodeStatus, sum_seconds

PeerProcessState = Literal["starting", "running", "lost", "ended"]


@dataclass(frozen=True)
class PeerSummary:
    """One peer; `status` is the last one since its latest start, `bytes_sent` counts all its starts."""

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
    """All peers of the swarm, `elapsed` seconds after its start."""

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
        """Return the progress from 0 to 1 towards the nearer of the two targets."""
        rounds = self.round / self.target_rounds if self.target_rounds else 0.0
        tokens = self.tokens / self.target_tokens if self.target_tokens else 0.0
        return min(1.0, max(rounds, tokens))


@dataclass
class PeerTotals:
    """The totals of one peer over all its starts in this swarm: the last status of each start, by start time."""

    status_by_start: dict[float, NodeStatus]

    def record(self, status: NodeStatus) -> None:
        """Keep the status as the last one of its start."""
        self.status_by_start[status.since] = status

    @property
    def peer_id(self) -> str:
        """Return the id of the peer; empty before its first status."""
        return next((status.peer_id for status in self.status_by_start.values()), "")

    @property
    def name(self) -> str:
        return next((status.name for status in self.status_by_start.values()), "")

    @property
    def bytes_sent(self) -> int:
        return sum(status.bytes_sent for status in self.status_by_start.values())

    def newest_seconds(self) -> dict[str, float]:
        """Return the seconds by activity of the newest start that reports any.

        A restarted trainer continues the counts of its checkpoint, so the starts must not be added up.
        """
        reported = {since: status.seconds for since, status in self.status_by_start.items() if status.seconds}
        return dict(reported[max(reported)]) if reported else {}


def compute_share(peer_totals: Sequence[PeerTotals]) -> float | None:
    """Return the fraction of the trainers' seconds that they spent training or evaluating the model."""
    seconds_by_peer = [totals.newest_seconds() for totals in peer_totals]
    total = sum(sum(seconds.values()) for seconds in seconds_by_peer)
    return sum(sum_seconds(seconds, *COMPUTE_ACTIVITIES) for seconds in seconds_by_peer) / total if total else None
