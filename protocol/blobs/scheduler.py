"""Scheduling of piece requests: which piece to request from which source next. No I/O.

A scheduler knows the missing pieces, the sources and their past performance; the caller passes the time (seconds) and
the randomness.
- At most 4 sources work at once, each on 2 pieces, or more if its link can use them. The fastest go first. A source
  that was never tried counts as half as fast as the best one, so it is tried where it may be an improvement.
- Requests that other downloads made to a source and that are not answered yet take up its slots too. Blobs therefore
  complete one after the other, the first ones soon, instead of all at the end. A list of hashes waits for no slot, so
  that it is there when its blob's turn comes and the source's link does not idle until then.
- A request whose source is too slow is late: it continues, but no longer takes up its source's slot, and once no
unbegun
  piece is left, its piece is requested from another source as well. The first to deliver wins. A source is slow only
  compared with the others or below a floor: where our own link is the bottleneck, requesting twice would make it worse.
  For the same reason a request that waits behind others of its source, in any download, is not late while these make
  progress. It becomes late only when the source delivered twice as much as was due before it and still nothing of it,
  and not before twice the time that this takes at an even share of the incoming rate: a source serves others too, and
  on slow links each of them waits for seconds and then receives much at once.
- A source that fails is left alone for a while, longer each time. A source that lies is never used again.

`InFlightLimit` bounds the bytes that are requested and not received yet, over all sources. Requested bytes queue on
their way, either before our own link or before the sources', and later requests wait behind them however urgent they
are. The limit is therefore the amount received in the last two seconds, and never less than keeps a few requests
running.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from protocol.blobs.blob import PIECE_BYTES
from protocol.identity import PeerId

SMALL_BYTES = 32 * 1024  # of a whole download: too small to delay others
DENIALS_UNTIL_ABSENT = 2  # per source: the first denial may have crossed the blob's arrival there
NONE_AWAITED: Final[Mapping[PeerId, int]] = MappingProxyType({})


class RequestFailure(StrEnum):
    """Why a request did not deliver its piece."""

    LIED = "lied"
    ABSENT = "does not have it"
    BUSY = "is busy"
    SLOW = "too slow"
    LOST = "does not answer"


@dataclass(frozen=True)
class DownloadPolicy:
    """When to wait and when to give up; times in seconds, speeds in bytes a second."""

    sources: int = 4
    pieces_per_source: int = 2
    stall_seconds: float = 5.0  # a request fails if it, and all others of its source, receive nothing for this long
    min_speed: float = 8 * 1024  # a request below this speed is late, and finally fails
    slack: float = 8.0  # a request may take this many times as long as its source's speed suggests
    min_seconds: float = 10.0  # every request may take at least this long
    late_after_seconds: float = 1.0  # no request is late before; later on slow links, up to `stall_seconds`
    late_share: float = 0.25  # a request with this share of the best source's speed is not late
    first_retry_seconds: float = 0.25  # delay after the first failure, doubled with each further one
    max_retry_seconds: float = 5.0


@dataclass(frozen=True)
class PieceRequest:
    """A request for one piece to one source, which may take `seconds` in total."""

    peer: PeerId
    piece: int
    seconds: float


@dataclass
class SourceStats:
    """The past performance of a source; `tie_breaker` is random."""

    tie_breaker: float
    speed: float | None = None  # bytes a second of one request, smoothed
    failures: int = 0  # in a row
    denials: int = 0  # "does not have it" answers in a row
    retry_at: float = float("-inf")
    tried: bool = False
    banned: bool = False
    last_failure: str = ""


@dataclass
class RunningRequest:
    """A request that is running."""

    request: PieceRequest
    started_at: float
    length: int
    received_before: int  # bytes received from its source when it started
    bytes_due: int  # bytes that the source owed then, including this request's
    received: int = 0


@dataclass
class InflowStats:
    """Received bytes of all downloads.

    It holds the total of each peer, and the recent rate of all together.
    """

    received_by_peer: Counter[PeerId] = field(default_factory=Counter)
    rate: float = 0.0

    def seconds_for(self, size: int) -> float:
        """Return the seconds for `size` bytes of one peer, or 0 if unknown.

        All peers are assumed to deliver at the same rate.
        """
        return size * len(self.received_by_peer) / self.rate if self.rate else 0.0


@dataclass
class SourceSet:
    """All sources of one blob.

    They are kept as long as the blob is being fetched, because a ban must outlive a departure.

    `parallelism` returns how many parallel requests a peer's link can use.
    """

    policy: DownloadPolicy
    rng: random.Random
    parallelism: Callable[[PeerId], int] = lambda peer: 0
    inflow: InflowStats = field(default_factory=InflowStats)
    by_peer: dict[PeerId, SourceStats] = field(default_factory=dict)
    present: frozenset[PeerId] = frozenset()

    def update_present(self, peers: Iterable[PeerId]) -> None:
        """Set the peers that may have the blob now."""
        self.present = frozenset(peers)
        for peer in sorted(self.present - self.by_peer.keys()):
            self.by_peer[peer] = SourceStats(self.rng.random())

    def available_sources(self, now: float) -> list[PeerId]:
        """Return the sources that may be used now, best first."""
        usable = [peer for peer in self.present if not self.by_peer[peer].banned and self.by_peer[peer].retry_at <= now]
        assumed = self.best_speed / 2
        stats = {peer: self.by_peer[peer] for peer in usable}
        return sorted(usable, key=lambda peer: (-(stats[peer].speed or assumed), stats[peer].tie_breaker))

    @property
    def best_speed(self) -> float:
        """Return the speed of the fastest source, or 0 if none has delivered."""
        return max((source.speed or 0.0 for source in self.by_peer.values()), default=0.0)

    def record_success(self, peer: PeerId, speed: float) -> None:
        source = self.by_peer[peer]
        source.speed = speed if source.speed is None else 0.7 * source.speed + 0.3 * speed
        source.failures = source.denials = 0
        source.retry_at = float("-inf")

    def record_failure(self, peer: PeerId, failure: RequestFailure, reason: str, now: float) -> None:
        source, policy = self.by_peer[peer], self.policy
        pause = min(policy.max_retry_seconds, policy.first_retry_seconds * 2.0 ** min(source.failures, 30))
        source.retry_at = now + pause * self.rng.uniform(0.5, 1.5)
        source.failures += 1
        source.denials = source.denials + 1 if failure is RequestFailure.ABSENT else 0
        source.last_failure = reason or failure
        source.banned = source.banned or failure is RequestFailure.LIED
        if failure is RequestFailure.SLOW and source.speed:
            source.speed /= 2

    @property
    def all_lack_blob(self) -> bool:
        """Return whether every usable source has denied twice to have the blob."""
        usable = [source for peer in self.present if not (source := self.by_peer[peer]).banned]
        return bool(usable) and all(source.denials >= DENIALS_UNTIL_ABSENT for source in usable)

    def timeout_for(self, peer: PeerId, length: int) -> float:
        """Return how long a request for `length` bytes may take."""
        policy, speed = self.policy, self.by_peer[peer].speed
        longest = max(policy.min_seconds, length / policy.min_speed)
        return min(longest, max(policy.min_seconds, policy.slack * length / speed)) if speed else longest

    def last_failures(self) -> dict[PeerId, str]:
        """Return the last failure of each source that was tried."""
        return {peer: source.last_failure or "slow" for peer, source in self.by_peer.items() if source.tried}


class DownloadScheduler:
    """The piece requests of one download.

    `lengths` maps the missing pieces to their lengths in bytes.
    """

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
        """Return a request to start at once, or None; call this until it returns None.

        `awaited_elsewhere` is the number of bytes by source that other downloads await. With `idle_only`, only sources
        from which nothing is awaited are used.
        """
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
        """Return whether a piece could be requested from some source now."""
        return bool(self._waiting) or any(self._is_late(progress, now) for progress in self._running_requests())

    def is_running(self, request: PieceRequest) -> bool:
        """Return whether the piece of this request is still needed."""
        return self._find(request) is not None

    def awaited_bytes(self, now: float) -> dict[PeerId, int]:
        """Return the awaited bytes by source; late requests do not count."""
        awaited: dict[PeerId, int] = {}
        for progress in self._running_requests():
            if not self._is_late(progress, now):
                awaited[progress.request.peer] = awaited.get(progress.request.peer, 0) + progress.length
        return awaited

    def record_received(self, request: PieceRequest, size: int) -> None:
        """Record received bytes of a piece."""
        self._sources.inflow.received_by_peer[request.peer] += size
        if progress := self._find(request):
            progress.received += size

    def record_success(self, request: PieceRequest, now: float) -> list[PieceRequest]:
        """Record that the piece arrived and was checked.

        The other requests for it are forgotten here and returned to be cancelled.
        """
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
        """Record a failed request; `reason` is for the log."""
        self._sources.record_failure(request.peer, failure, reason, now)
        running = self._running.get(request.piece, {})
        running.pop(request.peer, None)
        if not running and self._running.pop(request.piece, None) is not None:
            self._waiting.appendleft(request.piece)

    def _ready_sources(
        self, busy: Mapping[PeerId, list[RunningRequest]], awaited_elsewhere: Mapping[PeerId, int], now: float
    ) -> list[PeerId]:
        """Return the sources that may get one more request, the least busy first.

        Only the best few are eligible: a slower one finishes its requests and then makes room.
        """
        late = {peer for peer, calls in busy.items() if self._are_late(calls, now)}
        slots = self._policy.sources - len(busy.keys() - late)
        ready = []
        for peer in [peer for peer in self._sources.available_sources(now) if peer not in late][: self._policy.sources]:
            if peer not in busy:
                slots -= 1
            if slots >= 0 or peer in busy:
                ready.append(peer)
        own_load = {peer: float(len(busy.get(peer, ()))) for peer in ready}
        total_load = {peer: calls + awaited_elsewhere.get(peer, 0) / PIECE_BYTES for peer, calls in own_load.items()}
        relevant_load = own_load if self.is_small else total_load
        return [
            peer
            for peer in sorted(ready, key=total_load.__getitem__)
            if relevant_load[peer] < self._parallelism_of(peer)
        ]

    def _max_requests(self) -> int:
        """Return twice the number of slots, or more if a source can use more.

        The factor is 2 because late requests take up no slot.
        """
        return max(2 * self._policy.sources * self._policy.pieces_per_source, self.max_parallelism)

    @property
    def max_parallelism(self) -> int:
        """Return the largest number of parallel requests that a source's link can use."""
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
        """Return whether at least half of the requests are late.

        Of many connections to one peer, one may be unlucky.
        """
        return 2 * sum(self._is_late(call, now) for call in requests) >= len(requests)

    def _is_late(self, progress: RunningRequest, now: float) -> bool:
        policy, elapsed = self._policy, now - progress.started_at
        if elapsed < policy.late_after_seconds:
            return False
        arrived = self._sources.inflow.received_by_peer[progress.request.peer] - progress.received_before
        if arrived >= 2 * progress.bytes_due and not progress.received:
            return True
        min_speed = max(policy.min_speed, policy.late_share * self._sources.best_speed)
        return arrived < min_speed * elapsed and elapsed >= min(
            policy.stall_seconds, 2 * self._sources.inflow.seconds_for(progress.bytes_due)
        )

    def _start_request(self, peer: PeerId, piece: int, now: float, awaited_elsewhere: int) -> PieceRequest:
        if self._waiting and self._waiting[0] == piece:
            self._waiting.popleft()
        length = self._lengths[piece]
        request = PieceRequest(peer, piece, self._sources.timeout_for(peer, length))
        due = awaited_elsewhere + self.awaited_bytes(now).get(peer, 0) + length
        self._running.setdefault(piece, {})[peer] = RunningRequest(
            request, now, length, self._sources.inflow.received_by_peer[peer], due
        )
        self._sources.by_peer[peer].tried = True
        return request

    def _running_requests(self) -> list[RunningRequest]:
        return [progress for running in self._running.values() for progress in running.values()]

    def _find(self, request: PieceRequest) -> RunningRequest | None:
        return self._running.get(request.piece, {}).get(request.peer)


WINDOW_SECONDS = 2.0


SAMPLE_SECONDS = 0.5


RATE_DECAY = 0.9  # of the rate per sample: a low sample may be a source that paused or a link that changed


MIN_PIECES = 4


# Bytes a second. Below this rate, compressing incoming pieces costs at most a twentieth of a core and saves a sixth.
SLOW_LINK_RATE = 16e6


class InFlightLimit:
    """The limit of awaited bytes.

    `rate` is the recent rate in bytes a second, or 0 before the first byte.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: tuple[float, int] | None = None

    def observe(self, now: float, received: int, is_idle: bool) -> None:
        """Record the bytes received so far; a time without requests teaches nothing."""
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
        """Return whether a link is known to be the bottleneck."""
        return 0 < self.rate < SLOW_LINK_RATE

    def max_bytes(self, min_pieces: int) -> int:
        """Return the limit in bytes, which allows at least `min_pieces`.

        That is the need of the source with the most connections.
        """
        return max(int(WINDOW_SECONDS * self.rate), max(min_pieces, MIN_PIECES) * PIECE_BYTES)


Receive = Callable[[DownloadScheduler, PieceRequest], Awaitable[None]]


class SchedulerRun:
    """Runs the requests of one scheduler, owned by its download."""

    def __init__(self, scheduler: DownloadScheduler, receive: Receive) -> None:
        self.scheduler = scheduler
        self.running: dict[asyncio.Task[None], PieceRequest] = {}
        self._receive = receive
        self._request_ended = asyncio.Event()  # at least one request has ended
        self._abort_error: BaseException | None = None

    def start_request(self, awaited_elsewhere: Mapping[PeerId, int], now: float, *, idle_only: bool) -> bool:
        """Start one request if that makes sense, and return whether it did.

        `awaited_elsewhere` is the number of bytes by source that other downloads await; with `idle_only`, only sources
        that owe us nothing are used.
        """
        request = self.scheduler.next_request(now, awaited_elsewhere, idle_only=idle_only)
        if request is None:
            return False
        task = asyncio.ensure_future(self._receive(self.scheduler, request))
        task.add_done_callback(self._on_request_ended)
        self.running[task] = request
        return True

    def _on_request_ended(self, _: asyncio.Task[None]) -> None:
        self._request_ended.set()

    async def wait_for_ended(self) -> list[asyncio.Task[None]]:
        """Wait until at least one request has ended, and return the ended ones."""
        await self._request_ended.wait()
        self._request_ended.clear()
        if self._abort_error:
            raise self._abort_error
        return [task for task in self.running if task.done()]

    def abort(self, error: BaseException) -> None:
        """Fail the run, because no requests are started any more."""
        self._abort_error = error
        self._request_ended.set()
