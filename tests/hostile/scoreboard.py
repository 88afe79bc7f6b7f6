"""What the honest peers did before, during and after an attack, by the rounds that each of them recorded."""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

LOSS_LIMIT = 1.05  # above: the attack did harm; honest losses of a few rounds differ by 2 %
PACE_LIMIT = 0.9
RUINED_LOSS = 1.15  # a control must do harm that noise cannot
RUINED_PACE = 0.5


@dataclass(frozen=True)
class Window:
    """A span of the machine's monotonic clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RoundLine:
    """One round that an honest peer applied."""

    time: float
    round: int
    digest: str
    state: str
    senders: tuple[tuple[str, ...], ...]
    tokens: int
    loss: float | None


def read_rounds(path: Path) -> list[RoundLine]:
    """Return the rounds that a peer recorded; the last line may be half written."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            break
        senders = tuple(tuple(commit) for commit in values.pop("senders"))
        found.append(RoundLine(senders=senders, **values))
    return found


def pace(rounds: Sequence[RoundLine], window: Window) -> float:
    """Return the rounds a second in a window; a round that its end cuts counts in part."""
    return (_position(rounds, window.end) - _position(rounds, window.start)) / window.seconds


def _position(rounds: Sequence[RoundLine], time: float) -> float:
    before = [line.time for line in rounds if line.time <= time]
    if not before or len(before) == len(rounds):
        return float(len(before))
    return len(before) + (time - before[-1]) / (rounds[len(before)].time - before[-1])


def slowest_pace(by_peer: Mapping[str, Sequence[RoundLine]], windows: Iterable[Window]) -> float:
    """Return the pace of the slowest peer over all windows together."""
    spans = list(windows)
    total = sum(window.seconds for window in spans)
    return min(sum(pace(rounds, window) * window.seconds for window in spans) / total for rounds in by_peer.values())


def mean_loss(by_peer: Mapping[str, Sequence[RoundLine]], window: Window) -> float:
    """Return the largest mean training loss of a peer; infinite if a peer has none that is finite."""
    return max(_mean_loss(rounds, window) for rounds in by_peer.values())


def _mean_loss(rounds: Sequence[RoundLine], window: Window) -> float:
    inside = [line.loss for line in rounds if window.start <= line.time <= window.end]
    last = [line.loss for line in rounds if line.time <= window.end][-1:]
    losses = [loss for loss in inside or last if loss is not None]
    return statistics.fmean(losses) if losses and all(map(math.isfinite, losses)) else math.inf


def are_digests_equal(by_peer: Mapping[str, Sequence[RoundLine]], window: Window) -> bool:
    """Return whether all peers decided each round of a window alike, and all decided one of the same rounds."""
    digests = defaultdict[int, set[tuple[str, str]]](set)
    seen = Counter[int]()
    for rounds in by_peer.values():
        lines = [line for line in rounds if window.start <= line.time <= window.end]
        seen.update({line.round for line in lines})
        for line in lines:
            digests[line.round].add((line.digest, line.state))
    return max(map(len, digests.values()), default=1) == 1 and max(seen.values(), default=0) == len(by_peer)


def count_foreign_rounds(by_peer: Mapping[str, Sequence[RoundLine]], since: float, trainers: Set[str]) -> int:
    """Return how many rounds since then have, at some peer, a contribution of a key that is none of the trainers'."""
    inside = [line for rounds in by_peer.values() for line in rounds if line.time >= since]
    return len({line.round for line in inside if not trainers >= set(chain.from_iterable(line.senders))})


@dataclass(frozen=True)
class Score:
    """One attack against one swarm; `facts` are what the attacker measured beside the rounds."""

    loss_ratio: float
    pace_ratio: float
    digests_equal: bool
    counters: Mapping[str, int]
    facts: Mapping[str, float] = field(default_factory=dict)
    foreign_rounds: int = 0

    def is_harmed(self, min_pace: float, limits: Mapping[str, float]) -> bool:
        """Return whether the honest are worse off than without the attack."""
        is_slow = self.pace_ratio < min_pace
        is_changed = not self.digests_equal or self.foreign_rounds > 0
        return is_slow or is_changed or self.loss_ratio > LOSS_LIMIT or self._is_above(limits, 1.0)

    def is_ruined(self, limits: Mapping[str, float]) -> bool:
        """Return whether the harm is so large that no noise explains it."""
        if limits:
            return self._is_above(limits, 2.0)
        is_changed = not self.digests_equal or self.foreign_rounds > 0
        return is_changed or self.loss_ratio > RUINED_LOSS or self.pace_ratio < RUINED_PACE

    def _is_above(self, limits: Mapping[str, float], factor: float) -> bool:
        return any(self.facts.get(name, 0.0) > factor * limit for name, limit in limits.items())


@dataclass(frozen=True)
class Result:
    """A line of the report."""

    attack: str
    loss_ratio: float
    pace_ratio: float
    digests_equal: bool
    counted: bool
    control_succeeds: bool
    counters: Mapping[str, int]
    facts: Mapping[str, float]
    control: Mapping[str, object]
    defended: bool

    def to_json(self) -> dict[str, object]:
        return {key: _finite(value) for key, value in asdict(self).items()}


def _finite(value: object) -> object:
    """JSON has no infinity."""
    return 1e99 if isinstance(value, float) and not math.isfinite(value) else value
