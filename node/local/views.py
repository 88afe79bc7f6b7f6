"""PURE: what `murmur up` sees of its peers at one moment, and how far the run is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from node.status import AT_THE_MODEL, NodeStatus, spent

State = Literal["starting", "running", "lost", "ended"]


@dataclass(frozen=True)
class PeerView:
    """One peer process. `status` is the last it told in its present life; `sent`: bytes in all its lives."""

    name: str
    state: State
    status: NodeStatus | None
    sent: int = 0

    @property
    def word(self) -> str:
        if self.state != "running" or self.status is None:
            return self.state
        return "paused" if self.status.paused else self.status.phase

    @property
    def round(self) -> int:
        return self.status.round if self.status else 0


@dataclass(frozen=True)
class SwarmView:
    """All peers of this machine. `elapsed` in seconds since the start of the swarm."""

    run: str
    target_rounds: int | None
    target_tokens: int | None
    elapsed: float
    peers: tuple[PeerView, ...]

    @property
    def present(self) -> tuple[PeerView, ...]:
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


class Remaining:
    """Estimates the seconds left from the pace since the first progress seen (a resumed run starts half-way)."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def estimate(self, view: SwarmView) -> float | None:
        if not view.progress:
            return None
        if self._first is None:
            self._first = (view.elapsed, view.progress)
        seconds, gained = view.elapsed - self._first[0], view.progress - self._first[1]
        return seconds * (1 - view.progress) / gained if gained > 0 else None


@dataclass
class Ledger:
    """What one peer has done over all its lives in this swarm: the last status of each, by its start time."""

    lives: dict[float, NodeStatus]

    def note(self, status: NodeStatus) -> None:
        self.lives[status.since] = status

    @property
    def bytes_sent(self) -> int:
        return sum(status.bytes_sent for status in self.lives.values())

    def seconds(self) -> dict[str, float]:
        """Of the newest life that told any: a trainer goes on counting where the life before it was saved."""
        told = {since: status.seconds for since, status in self.lives.items() if status.seconds}
        return dict(told[max(told)]) if told else {}


def compute_share(ledgers: Sequence[Ledger]) -> float | None:
    """Seconds at the model, training or measuring it, over all seconds that the trainers accounted for."""
    sums = [ledger.seconds() for ledger in ledgers]
    whole = sum(sum(seconds.values()) for seconds in sums)
    return sum(spent(seconds, *AT_THE_MODEL) for seconds in sums) / whole if whole else None
