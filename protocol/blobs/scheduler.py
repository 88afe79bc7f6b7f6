"""PURE: which piece is asked of which source next.

A plan knows the missing pieces, the sources and how each has done so far; clock and randomness are handed in.
- At most 4 sources work at once, each on 2 pieces, or more where its link has use for them. The fastest go first; a
  source not tried yet counts as half as fast as the best one, so it is tried where it may well be an improvement.
- What other plans have asked of a source and not got yet takes its places, too: blobs come one after the other, the
  first ones soon, instead of all at the end. A list of hashes waits for no place: it is there when its blob's turn
  comes, and the source's link does not stand idle until then.
- A call whose source is too slow is late: it goes on, but no longer fills its source's place, and once no piece is left
  to begin with, its piece is asked of another source as well. The first to deliver wins. A source is slow only against
  the others' speed or below a floor: where our own link is the narrow one, asking twice would make it narrower. For the
  same reason a call that waits behind others of its source, in whichever plan, is not late while these get on; only
  when twice as much came of the source as was to come before it, and still nothing of its own. Nor is it before twice
  the time that this takes at an even share of what comes: a source has others to serve, and on slow links each of them
  waits for seconds, and then gets much at once.
- A source that fails is left alone for a while, longer each time. One that lies is never asked again.

PURE: how many bytes may have been asked for and not come yet, over all sources.

What was asked for queues on its way: before our own link if that is the narrow one, before the sources' otherwise, and
what is asked for later comes later, however urgent. So it is as much as lately came in two seconds, and never less than
keeps a few calls running. Clock in seconds.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from protocol.blobs.blob import PIECE_BYTES
from protocol.identity import PeerId

SMALL_BYTES = 32 * 1024  # of all of a plan: it holds up nobody
DENIALS_UNTIL_ABSENT = 2  # of a source: the first may have crossed the blob's arrival there
NONE_AWAITED: Final[Mapping[PeerId, int]] = MappingProxyType({})


class RequestFailure(StrEnum):
    """Why a call did not deliver its piece."""

    LIED = "lied"
    ABSENT = "does not have it"
    BUSY = "is busy"
    SLOW = "too slow"
    LOST = "does not answer"


@dataclass(frozen=True)
class DownloadPolicy:
    """When to wait and when to give up; seconds and bytes a second."""

    sources: int = 4
    pieces_per_source: int = 2
    stall_seconds: float = 5.0  # a call without a byte for so long has failed, if all of its source's are silent
    min_speed: float = 8 * 1024  # a call below this speed is late, and in the end fails
    slack: float = 8.0  # a call may take so many times what its source took before
    min_seconds: float = 10.0  # no call has less time than this
    late_after_seconds: float = 1.0  # no call is late before; on slow links later, up to `stall`
    late_share: float = 0.25  # nor while it has this share of the best source's speed
    first_retry_seconds: float = 0.25  # after the first failure, doubled with each one that follows
    max_retry_seconds: float = 5.0


@dataclass(frozen=True)
class PieceRequest:
    """One piece asked of one source; `seconds` is how long it may take altogether."""

    peer: PeerId
    piece: int
    seconds: float


@dataclass
class SourceStats:
    """How a peer has done so far. `order` breaks ties at random."""

    tie_breaker: float
    speed: float | None = None  # bytes a second of one call, smoothed
    failures: int = 0  # in a row
    denials: int = 0  # in a row, that it does not have the blob
    retry_at: float = float("-inf")
    tried: bool = False
    banned: bool = False
    last_failure: str = ""  # the last failure, in words


@dataclass
class RunningRequest:
    """A call that runs."""

    request: PieceRequest
    started_at: float
    length: int
    received_before: int  # bytes that had come of its source
    bytes_due: int  # of which that many were to come then, its own the last of them
    received: int = 0


@dataclass
class InflowStats:
    """What comes in all plans: bytes of each peer so far, and of all together in a second, lately."""

    received_by_peer: Counter[PeerId] = field(default_factory=Counter)
    rate: float = 0.0

    def seconds_for(self, size: int) -> float:
        """How long so much of one peer takes where all give the same; 0 where nothing is known."""
        return size * len(self.received_by_peer) / self.rate if self.rate else 0.0


@dataclass
class SourceSet:
    """All the sources of one blob, remembered as long as it is being fetched: a ban must outlive a departure.

    `places`: the pieces that a peer's link has use for at once.
    """

    policy: DownloadPolicy
    rng: random.Random
    parallelism: Callable[[PeerId], int] = lambda peer: 0
    inflow: InflowStats = field(default_factory=InflowStats)
    by_peer: dict[PeerId, SourceStats] = field(default_factory=dict)
    present: frozenset[PeerId] = frozenset()

    def update_present(self, peers: Iterable[PeerId]) -> None:
        """Those that may have the blob now."""
        self.present = frozenset(peers)
        for peer in sorted(self.present - self.by_peer.keys()):
            self.by_peer[peer] = SourceStats(self.rng.random())

    def available_sources(self, now: float) -> list[PeerId]:
        """Those that may be asked, best first."""
        able = [peer for peer in self.present if not self.by_peer[peer].banned and self.by_peer[peer].retry_at <= now]
        assumed = self.best_speed / 2
        stats = {peer: self.by_peer[peer] for peer in able}
        return sorted(able, key=lambda peer: (-(stats[peer].speed or assumed), stats[peer].tie_breaker))

    @property
    def best_speed(self) -> float:
        """Bytes a second of the fastest; 0 where none has delivered."""
        return max((source.speed or 0.0 for source in self.by_peer.values()), default=0.0)

    def record_success(self, peer: PeerId, speed: float) -> None:
        source = self.by_peer[peer]
        source.speed = speed if source.speed is None else 0.7 * source.speed + 0.3 * speed
        source.failures = source.denials = 0
        source.retry_at = float("-inf")

    def record_failure(self, peer: PeerId, failure: RequestFailure, reason: str, now: float) -> None:
        source, pace = self.by_peer[peer], self.policy
        pause = min(pace.max_retry_seconds, pace.first_retry_seconds * 2.0 ** min(source.failures, 30))
        source.retry_at = now + pause * self.rng.uniform(0.5, 1.5)
        source.failures += 1
        source.denials = source.denials + 1 if failure is RequestFailure.ABSENT else 0
        source.last_failure = reason or failure
        source.banned = source.banned or failure is RequestFailure.LIED
        if failure is RequestFailure.SLOW and source.speed:
            source.speed /= 2

    @property
    def all_lack_blob(self) -> bool:
        """Whether all of them have said twice that they do not have it."""
        able = [source for peer in self.present if not (source := self.by_peer[peer]).banned]
        return bool(able) and all(source.denials >= DENIALS_UNTIL_ABSENT for source in able)

    def timeout_for(self, peer: PeerId, length: int) -> float:
        """How long a call for `length` bytes may take."""
        pace, speed = self.policy, self.by_peer[peer].speed
        longest = max(pace.min_seconds, length / pace.min_speed)
        return min(longest, max(pace.min_seconds, pace.slack * length / speed)) if speed else longest

    def last_failures(self) -> dict[PeerId, str]:
        """The last failure of each source that was ever asked."""
        return {peer: source.last_failure or "slow" for peer, source in self.by_peer.items() if source.tried}


class DownloadScheduler:
    """Pieces to be fetched: their number to their length in bytes."""

    def __init__(self, lengths: Mapping[int, int], sources: SourceSet) -> None:
        self._lengths = lengths
        self._sources = sources
        self._policy = sources.policy
        self._waiting = deque(sorted(lengths))
        self._running: dict[int, dict[PeerId, RunningRequest]] = {}
        self.is_small = sum(lengths.values()) <= SMALL_BYTES

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._running

    def next_request(
        self, now: float, awaited_elsewhere: Mapping[PeerId, int] = NONE_AWAITED, *, idle_only: bool = False
    ) -> PieceRequest | None:
        """A call to begin at once, if there is one; ask until there is none. `elsewhere`: what other plans await;
        `idle_only`: ask nobody of whom anything is awaited."""
        busy: dict[PeerId, list[RunningRequest]] = {}
        for progress in self._running_requests():
            busy.setdefault(progress.request.peer, []).append(progress)
        if sum(map(len, busy.values())) >= self._max_requests():
            return None
        for peer in self._ready_sources(busy, awaited_elsewhere, now):
            if idle_only and (peer in busy or awaited_elsewhere.get(peer)):
                continue
            piece = self._piece_for(peer, now)
            if piece is not None:
                return self._start_request(peer, piece, now, awaited_elsewhere.get(peer, 0))
        return None

    def can_start_request(self, now: float) -> bool:
        """Whether there is a piece that anybody could be asked for now."""
        return bool(self._waiting) or any(self._is_late(progress, now) for progress in self._running_requests())

    def is_running(self, request: PieceRequest) -> bool:
        """Whether anybody still waits for what this call brings."""
        return self._find(request) is not None

    def awaited_bytes(self, now: float) -> dict[PeerId, int]:
        """Bytes of the calls that run, by source; for those that are late nobody waits."""
        awaited: dict[PeerId, int] = {}
        for progress in self._running_requests():
            if not self._is_late(progress, now):
                awaited[progress.request.peer] = awaited.get(progress.request.peer, 0) + progress.length
        return awaited

    def record_received(self, request: PieceRequest, size: int) -> None:
        """Some bytes of a piece came."""
        self._sources.inflow.received_by_peer[request.peer] += size
        if progress := self._find(request):
            progress.received += size

    def record_success(self, request: PieceRequest, now: float) -> list[PieceRequest]:
        """The piece is there and checked. Returns the other calls for it, to be cancelled; they are forgotten here."""
        running = self._running.pop(request.piece, None)
        if running is None:
            return []
        progress = running.pop(request.peer)
        self._sources.record_success(request.peer, progress.length / max(now - progress.started_at, 1e-6))
        for other in running.values():
            if self._is_late(other, now):
                self._sources.record_failure(other.request.peer, RequestFailure.SLOW, "slower than others", now)
        return [other.request for other in running.values()]

    def record_failure(self, request: PieceRequest, failure: RequestFailure, reason: str, now: float) -> None:
        """`trouble` says in words what happened."""
        self._sources.record_failure(request.peer, failure, reason, now)
        running = self._running.get(request.piece, {})
        running.pop(request.peer, None)
        if not running and self._running.pop(request.piece, None) is not None:
            self._waiting.appendleft(request.piece)

    def _ready_sources(
        self, busy: Mapping[PeerId, list[RunningRequest]], awaited_elsewhere: Mapping[PeerId, int], now: float
    ) -> list[PeerId]:
        """Sources that may be given one more piece, the least busy first.

        Only the best few are: a slower one finishes what it has and then makes room.
        """
        late = {peer for peer, calls in busy.items() if self._are_late(calls, now)}
        places = self._policy.sources - len(busy.keys() - late)
        ready = []
        for peer in [peer for peer in self._sources.available_sources(now) if peer not in late][: self._policy.sources]:
            if peer not in busy:
                places -= 1
            if places >= 0 or peer in busy:
                ready.append(peer)
        own = {peer: float(len(busy.get(peer, ()))) for peer in ready}
        taken = {peer: calls + awaited_elsewhere.get(peer, 0) / PIECE_BYTES for peer, calls in own.items()}
        counted = own if self.is_small else taken
        return [peer for peer in sorted(ready, key=taken.__getitem__) if counted[peer] < self._parallelism_of(peer)]

    def _max_requests(self) -> int:
        """Enough for all sources twice, as calls that are late fill no place, or for one that has use for more."""
        return max(2 * self._policy.sources * self._policy.pieces_per_source, self.max_parallelism)

    @property
    def max_parallelism(self) -> int:
        """Of any source: the pieces that its link has use for at once."""
        return max(map(self._parallelism_of, self._sources.present), default=0)

    def _parallelism_of(self, peer: PeerId) -> int:
        return max(self._policy.pieces_per_source, self._sources.parallelism(peer))

    def _piece_for(self, peer: PeerId, now: float) -> int | None:
        if self._waiting:
            return self._waiting[0]
        late = [
            (len(running), piece)
            for piece, running in self._running.items()
            if peer not in running and all(self._is_late(progress, now) for progress in running.values())
        ]
        return min(late)[1] if late else None

    def _are_late(self, requests: Sequence[RunningRequest], now: float) -> bool:
        """Whether at least half are: of many connections to one peer, one may be unlucky."""
        return 2 * sum(self._is_late(call, now) for call in requests) >= len(requests)

    def _is_late(self, progress: RunningRequest, now: float) -> bool:
        pace, taken = self._policy, now - progress.started_at
        if taken < pace.late_after_seconds:
            return False
        came = self._sources.inflow.received_by_peer[progress.request.peer] - progress.received_before
        if came >= 2 * progress.bytes_due and not progress.received:
            return True
        enough = max(pace.min_speed, pace.late_share * self._sources.best_speed)
        return came < enough * taken and taken >= min(
            pace.stall_seconds, 2 * self._sources.inflow.seconds_for(progress.bytes_due)
        )

    def _start_request(self, peer: PeerId, piece: int, now: float, awaited_elsewhere: int) -> PieceRequest:
        if self._waiting and self._waiting[0] == piece:
            self._waiting.popleft()
        length = self._lengths[piece]
        call = PieceRequest(peer, piece, self._sources.timeout_for(peer, length))
        due = awaited_elsewhere + self.awaited_bytes(now).get(peer, 0) + length
        self._running.setdefault(piece, {})[peer] = RunningRequest(
            call, now, length, self._sources.inflow.received_by_peer[peer], due
        )
        self._sources.by_peer[peer].tried = True
        return call

    def _running_requests(self) -> list[RunningRequest]:
        return [progress for running in self._running.values() for progress in running.values()]

    def _find(self, request: PieceRequest) -> RunningRequest | None:
        return self._running.get(request.piece, {}).get(request.peer)


WINDOW_SECONDS = 2.0
SAMPLE_SECONDS = 0.5
RATE_DECAY = 0.9  # of a rate, from one sample to the next: it was one source that paused, or the link that changed
MIN_PIECES = 4
SLOW_LINK_RATE = (
    16e6  # bytes a second: where fewer come, squeezing them takes a twentieth of a core at most, and saves a sixth
)


class InFlightLimit:
    """`bytes`: that may be awaited now. `rate`: bytes a second lately; 0 where nothing came yet."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: tuple[float, int] | None = None

    def observe(self, now: float, received: int, is_idle: bool) -> None:
        """`received`: bytes so far; nothing is learned from a time in which nothing was asked for."""
        if is_idle:
            self._since = None
        elif self._since is None:
            self._since = now, received
        elif now - self._since[0] >= SAMPLE_SECONDS:
            rate = (received - self._since[1]) / (now - self._since[0])
            self.rate = max(rate, RATE_DECAY * self.rate)
            self._since = now, received

    @property
    def is_slow(self) -> bool:
        """Whether a line is known to be what we wait for."""
        return 0 < self.rate < SLOW_LINK_RATE

    def max_bytes(self, min_pieces: int) -> int:
        """`calls`: those that the source with the most connections needs."""
        return max(int(WINDOW_SECONDS * self.rate), max(min_pieces, MIN_PIECES) * PIECE_BYTES)
