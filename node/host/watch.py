"""Looks at the swarm through a window and tells what has changed, twice a second at most.

Membership is read from the directory's table, rounds from the peers' chains, times and bytes from what peers say of
themselves. Nothing that goes wrong here reaches the swarm: training does not know that it is watched.
"""

import asyncio
import logging
import time
from collections import deque

from node.host.chronicle import MAX_LOSS, Chronicle, strays
from node.host.events import Forked, Found, Joined, Left, Lost, Measured, Moved, PeerNow, Reach, Strayed, Timed
from node.host.recorder import Recorder
from node.host.timing import Lanes
from node.host.views import peer_values, summary
from node.host.window import Window
from node.program import program_of
from protocol.identity import PeerId
from protocol.membership import directory
from protocol.membership.allowance import Allowance
from protocol.murmur_pb2 import PeerRecord
from protocol.network.reach import carriers_of, is_hidden
from protocol.tasks import end

logger = logging.getLogger(__name__)

TICK = 0.5  # seconds
PACE_SECONDS = 2.0  # over which a peer's sending is measured
KEPT_STRAYS = 256
MAX_SPEED = 1e15  # tokens a second: sums of what peers claim must stay finite
MAX_SHOWN = 1024  # peers; who comes later is shown when one of them leaves
ALL = ""  # strangers share one measure: keys cost nothing, and the journal is never cut
NEWS_AT_ONCE = 1024  # of strangers, each with its lines in the journal, and
NEWS_A_SECOND = 0.1  # from then on: 10 MB a day, whatever they do


class Watch:
    def __init__(self, window: Window, recorder: Recorder) -> None:
        self._window = window
        self._recorder = recorder
        self._chronicle = Chronicle(window.manifest.run_id, window.terms(), window.channel)
        # In groups everyone has a state of its own.
        self._one_state = program_of(window.manifest).method.topology.kind != "groups"
        self._known: dict[PeerId, PeerRecord] = {}
        self._reasons: dict[PeerId, str] = {}
        self._lanes = Lanes()
        self._paces: dict[PeerId, Pace] = {}
        self._strays: deque[tuple[PeerId, int]] = deque(maxlen=KEPT_STRAYS)
        self._measured = 0
        self._allowance = Allowance(NEWS_AT_ONCE, NEWS_A_SECOND)
        self._alone_since: float | None = None
        window.directory.subscribe(self._note)

    async def run(self) -> None:
        """Until cancelled. Raises StorageError where the journal cannot be written."""
        tasks = [asyncio.create_task(self._look_forever()), asyncio.create_task(self._follow_forever())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            await end(tasks)

    async def _look_forever(self) -> None:
        while True:
            self.look(time.time())
            await asyncio.sleep(TICK)

    async def _follow_forever(self) -> None:
        while True:
            await self._follow()
            await asyncio.sleep(TICK)

    async def _follow(self) -> None:
        now = time.time()
        target = self._chronicle.believed(self._recorder.state, self._trainers(now), now)
        if target is None:
            return
        head, peers = target
        for event in await self._chronicle.fetch(self._recorder.state, head, peers, now):
            self._recorder.record(event)
            if isinstance(event, Forked):  # on the other chain, rounds of these numbers are measured anew
                self._measured = min(self._measured, event.round)

    def look(self, now: float) -> None:
        """Tell what is different since the last look."""
        live = self._live(now)
        for peer in [peer for peer in self._known if peer not in live]:
            self._gone(peer, now)
        self._reasons.clear()  # of those who came and went unseen
        moved = [self._seen(peer, record, now) for peer, record in live.items() if self._is_news(peer, record)]
        self._known = live
        if moved:
            self._recorder.record(Moved(at=now, peers=tuple(moved)))
        self._tell_rounds(now)
        self._tell_sight(now)
        self._tell_moment(moved, now)

    @property
    def _known_round(self) -> int:
        last = self._recorder.state.rows.last
        return last.round if last else -1

    def _live(self, now: float) -> dict[PeerId, PeerRecord]:
        me = self._window.peer_id
        live = self._window.directory.live()
        shown = [peer for peer in live if peer != me or self._window.trains]
        shown.sort(key=lambda peer: peer not in self._known)
        room = sum(peer in self._known for peer in shown) + int(self._allowance.left(ALL, now))
        return {peer: live[peer] for peer in shown[: min(MAX_SHOWN, room)]}

    def _trainers(self, now: float) -> dict[PeerId, PeerRecord]:
        return {peer: record for peer, record in self._live(now).items() if record.role == "trainer"}

    def _is_news(self, peer: PeerId, record: PeerRecord) -> bool:
        known = self._known.get(peer)
        return known is None or known.sequence != record.sequence

    def _seen(self, peer: PeerId, record: PeerRecord, now: float) -> PeerNow:
        pace = self._paces.setdefault(peer, Pace(now, record.bytes_sent))
        told = peer_now(peer, record, pace.measured(record.bytes_sent, now), now)
        if peer not in self._known:
            self._allowance.take(ALL, now)
            self._recorder.record(Joined(at=now, now=told))
        if record.role == "trainer":
            self._lanes.note(peer, record, now, self._known_round)
        return told

    def _gone(self, peer: PeerId, now: float) -> None:
        self._recorder.record(Left(at=now, peer=peer, reason=self._reasons.pop(peer, "expired")))
        self._lanes.forget(peer)
        self._paces.pop(peer, None)

    def _tell_rounds(self, now: float) -> None:
        known = self._known_round
        for number, lanes in self._lanes.finished(now, known):
            self._recorder.record(Timed(at=now, round=number, lanes=lanes))
        trainers = self._trainers(now)
        for peer, record in trainers.items():
            if record.validation_round > self._measured and record.validation_round <= known + 1:
                self._measured = record.validation_round
                measured = Measured(at=now, peer=peer, round=self._measured, loss=min(record.validation_loss, MAX_LOSS))
                self._recorder.record(measured)
        for stray in strays(trainers) if self._one_state else ():
            if stray not in self._strays and self._allowance.take(ALL, now):
                self._strays.append(stray)
                self._recorder.record(Strayed(at=now, peer=stray[0], round=_bounded(stray[1])))

    def _tell_sight(self, now: float) -> None:
        """Lost, once nobody has been seen for as long as a record lives; it may only be our own link."""
        state = self._recorder.state
        if self._trainers(now):
            self._alone_since = None
            if state.lost is not None:
                self._recorder.record(Found(at=now))
            return
        self._alone_since = self._alone_since or now
        silence = self._window.manifest.membership.expiry
        if state.lost is None and len(state.rows) and now - self._alone_since > silence:
            self._recorder.record(Lost(at=now))

    def _tell_moment(self, moved: list[PeerNow], now: float) -> None:
        if not self._recorder.listeners:
            return
        state = self._recorder.state
        names = {told.peer for told in moved}
        peers = [peer_values(state, peer) for name, peer in state.peers.items() if name in names]
        self._recorder.tell("now", {**summary(state, now), "moved": peers})

    def _note(self, event: directory.Event) -> None:
        if isinstance(event, directory.Left):
            self._reasons[event.peer] = event.reason
        elif isinstance(event, directory.Joined):
            self._reasons.pop(event.peer, None)


class Pace:
    """Bytes a second, over the last while."""

    def __init__(self, began: float, count: int) -> None:
        self._began = began
        self._count = count
        self._value = 0.0

    def measured(self, count: int, now: float) -> float:
        if count < self._count:  # it was started again
            self._began = now
            self._count = count
            self._value = 0.0
        elif now - self._began >= PACE_SECONDS:
            self._value = (count - self._count) / (now - self._began)
            self._began = now
            self._count = count
        return round(self._value, 1)


def peer_now(peer: PeerId, record: PeerRecord, sending: float, now: float) -> PeerNow:
    return PeerNow(
        peer=peer,
        role="trainer" if record.role == "trainer" else "observer",
        name=record.name,
        device=record.device,
        version=record.version,
        reach=_reach(record),
        carriers=carriers_of(record.addresses),
        carried=_bounded(record.bytes_carried),
        round=_bounded(record.round),
        step=_bounded(record.step),
        tokens=_bounded(record.tokens),
        loss=max(-MAX_LOSS, min(record.loss, MAX_LOSS)) or None,
        tokens_per_second=min(record.tokens_per_second, MAX_SPEED),
        bytes_sent=_bounded(record.bytes_sent),
        sending=sending,
        resting=record.resting,
        seen=now,
    )


def _reach(record: PeerRecord) -> Reach:
    if not record.addresses:
        return "unknown"
    return "relay" if is_hidden(record.addresses) else "direct"


def _bounded(count: int) -> int:
    """What a peer claims may have 64 bits; what JSON carries exactly has 53."""
    return min(count, 2**53)
