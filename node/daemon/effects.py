"""Drives the pure round machine (protocol.consensus.machine) on the real network: one round after the other.

The machine decides; this class carries out. Statements come in through the Rounds service and as replies, blobs
through the fetcher, arithmetic through a worker thread; each result goes back into the machine as an event.

Statements of the next round may come early, from peers that have finished this one. Of each member the newest of each
kind is kept, and of strangers none: nobody can crowd out anybody.

A vow of the machine is written to disk by a thread; all that the machine says meanwhile waits, in order.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.checkpoints.vote_log import VoteLog
from node.daemon.downloads import Downloads
from node.daemon.outer_state import RoundCompute
from node.monitoring.status import RecoveredErrorKind
from node.workers import BackgroundTasks, RunInThread
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.consensus.events import (
    Action,
    BlobAvailable,
    Event,
    Fetch,
    Finish,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    PartReduced,
    Reduce,
    Rejected,
    RejectReason,
    RequestEarlySubmit,
    Send,
    Speculate,
    Tick,
    VoteRecord,
)
from protocol.consensus.machine import RoundMachine
from protocol.consensus.message_buffer import MessageBuffer, MessageKey, message_key
from protocol.consensus.message_kinds import ReducedPart, named_blobs, parse
from protocol.consensus.messages import Commit, Contribution, ContributionLimits, Digest, SignedMessage
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.errors import MalformedError, MissingFileError, PeerFault, StorageError, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.murmur_pb2 import Signed
from protocol.signing import sign

MAX_DECISION_REPLY_BYTES = 768 * 1024  # of one reply; what is more comes by post
RETRY_SECONDS = 1.0
MAX_PENDING_ACTIONS = 4096  # actions behind a vow; messages beyond that are dropped, as they are repeated anyway


@dataclass
class Hooks:
    """What the driver needs of its surroundings, and whom it tells.

    `trains`: whether that peer is a live trainer of the run, whatever its round. `refused` hears what is wrong with the
    statements that a peer has brought in one call. `foreseen` hears what will most likely be decided, its blobs in the
    store. `broken`: a fault in our own code.
    """

    send: Callable[[Iterable[PeerId], Signed], None]
    work: RunInThread
    members: Callable[[], MembershipChanged]
    trains: Callable[[PeerId], bool]
    refused: Callable[[PeerId, Sequence[PeerFault]], None]
    skipped: Callable[[PeerId | None, RejectReason], None]
    set_back: Callable[[RecoveredErrorKind, str], None]
    foreseen: Callable[[Commit], None]
    decided: Callable[[SignedMessage[Commit]], None]
    hurry: Callable[[], None]
    broken: Callable[[BaseException], None]


class Effects:
    """Between `begin` and the call of `hooks.decided` there is a machine; `decided` is called once a round."""

    def __init__(
        self, identity: Identity, settings: Callable[[int], RoundSettings], terms: ContributionLimits, store: BlobStore,
        workshop: RoundCompute, wishes: Downloads, vows: VoteLog, hooks: Hooks, pacing: Pacing,
    ) -> None:  # fmt: skip
        """Raises StorageError where the vows of an earlier process cannot be read."""
        self._identity = identity
        self._settings_of = settings
        self._terms = terms
        self._settings = settings(0)  # of the open round
        self._store = store
        self._workshop = workshop
        self._wishes = wishes
        self._hooks = hooks
        self._vows = vows
        self._vow = vows.load()
        self._vowing = False  # a vow is being written
        self._waiting: deque[Action] = deque()
        self._pacing = pacing
        self._machine: RoundMachine | None = None
        self._live: MembershipChanged | None = None  # what the open round knows of its members
        self._number = -1
        self._base: Digest = b""
        self._seen: Mapping[PeerId, float] | None = None
        self.left_out: frozenset[Digest] = frozenset()  # blobs of the last round that may be asked for in the next
        self._attendance = MessageBuffer(self._settings.leader_timeout)
        self._heard: dict[MessageKey, SignedMessage[Any]] = {}  # of the open round
        self._background = BackgroundTasks(hooks.broken)
        self._vow_writing = BackgroundTasks(hooks.broken)  # outlives the round: two threads must not write at once
        self._timer: asyncio.TimerHandle | None = None
        self._events: deque[Event] = deque()
        self._feeding = False

    @property
    def number(self) -> int:
        """Of the round that is open, or was last."""
        return self._number

    @property
    def is_open(self) -> bool:
        return self._machine is not None

    def begin(self, number: int, base: Digest, now_live: Iterable[PeerId]) -> None:
        """Open a round. `now_live`: every live trainer of the run, whatever its round."""
        now = _now()
        known = self._vow.members if self._vow else ()
        seen = self._seen if self._seen is not None else dict.fromkeys([*known, *now_live], now)
        self._number, self._base, self._settings = number, base, self._settings_of(number)
        me, urgency = self._identity.peer_id, self._pacing.early_submit_policy
        self._machine = RoundMachine(self._settings, me, number, base, self._sign, now, seen, self._vow, urgency)
        self._pacing.open_round(number, now)
        self._live = None
        self.members_changed()
        for statement in self._attendance.open_round(number):
            self.receive(statement)

    def check(self, commit: Commit) -> None:
        """MalformedError unless a commit, from wherever it came, is one of its round."""
        if not self._settings_of(commit.round).topology.accepts_commit(commit):
            raise MalformedError(f"a commit that round {commit.round} of this run cannot have")

    def close(self) -> None:
        """Give the open round up: this peer has moved to another chain, or stops."""
        self._end()
        self._attendance.clear()

    def offer(self, contribution: Contribution, steps: int | None = None) -> None:
        """Our own message for the open round; its blobs are in the store. `steps`: if it was made for this round."""
        self._pacing.record_submit(steps, _now())
        self._feed(LocalContribution(contribution))

    def members_changed(self) -> None:
        """Or may have: records are renewed far more often than any of them says something new."""
        if not self.is_open:
            return
        live = self._hooks.members()
        if live != self._live:
            self._live = live
            self._feed(live)

    def knows(self, peer: PeerId) -> bool:
        """Whether what it says may count: also of one that we have just lost sight of, as long as it has a vote."""
        return self._hooks.trains(peer) or (self._machine is not None and self._machine.has_voter(peer))

    def take(self, sender: PeerId, envelopes: Iterable[Signed]) -> list[Signed]:
        """Statements that `sender` brought (not all need be its own); returns what it seems to lack."""
        late: set[int] = set()
        faults: list[PeerFault] = []
        for signed in envelopes:
            try:
                statement = parse(signed, self._settings.run_id, self._terms)
            except PeerFault as fault:
                faults.append(fault)
                continue
            if self._attendance.is_late(statement):
                late.add(statement.body.round)
            self.receive(statement)
        if faults:
            self._hooks.refused(sender, faults)
        # Of the oldest round only: it has to be decided there before the others are of use.
        return self._answer(min(late), sender) if late else []

    def _answer(self, number: int, asker: PeerId) -> list[Signed]:
        """In one piece if it is small enough; otherwise it goes by post."""
        decision = self._attendance.answer_late(number, asker, _now())
        if sum(signed.ByteSize() for signed in decision) <= MAX_DECISION_REPLY_BYTES:
            return list(decision)
        for signed in decision:
            self._hooks.send([asker], signed)
        return []

    def receive(self, statement: SignedMessage[Any]) -> None:
        """A checked statement; those of the next round wait for it, others that are not of this round are dropped."""
        number = statement.body.round
        if number == self._number and self._machine is not None:
            if self._machine.has_voter(statement.sender):
                self._heard[message_key(statement)] = statement
            self._feed(MessageReceived(statement))
        elif number == self._number + 1 and self._hooks.trains(statement.sender):
            self._attendance.buffer_early(statement)

    def _feed(self, event: Event) -> None:
        """What an action causes at once (a peer found unreachable) waits until all actions are carried out."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._feeding = False
            self._events.clear()

    def _handle(self, event: Event) -> None:
        machine = self._machine
        if machine is None:
            return
        for action in machine.handle(event, _now()):
            if len(self._waiting) >= MAX_PENDING_ACTIONS and isinstance(action, Send):
                self._hooks.skipped(None, "slow disk")
            else:
                self._waiting.append(action)
        self._carry_out_waiting()
        if machine is self._machine:
            self._set_timer()

    def _carry_out_waiting(self) -> None:
        while self._waiting and not self._vowing:
            self._carry_out(self._waiting.popleft())

    def _carry_out(self, action: Action) -> None:
        match action:
            case VoteRecord():
                self._vow = action
                self._vowing = True
                self._vow_writing.spawn(self._keep_vow(action))
                if action.lock:
                    self._hooks.foreseen(action.lock.body)
            case Speculate(commit):
                self._hooks.foreseen(commit)
            case Send(peers, signed):
                self._hooks.send(peers, signed)
            case Fetch():
                self._fetch(action)
            case Reduce():
                self._background.spawn(self._reduce(action))
            case Finish(commit):
                self._finish(commit)
            case Rejected(peer, reason):
                self._hooks.skipped(peer, reason)
            case RequestEarlySubmit():
                self._pacing.record_early_request(_now())
                self._hooks.hurry()

    async def _keep_vow(self, vow: VoteRecord) -> None:
        """Whoever cannot keep its word must not give it: where this fails, nothing more is said."""
        try:
            await asyncio.to_thread(self._write_vow, vow)
        except StorageError as error:
            self._hooks.broken(error)  # for a person, who is told what to do
            return
        self._vowing = False
        self._carry_out_waiting()

    def _write_vow(self, vow: VoteRecord) -> None:
        for blob in vow.required_blobs:
            self._store.persist(blob.digest)
        self._vows.save(vow)

    def _fetch(self, order: Fetch) -> None:
        if self._wishes.request(order.part_blob, order.sources):
            self._background.spawn(self._get(order, self._number))

    async def _get(self, order: Fetch, number: int) -> None:
        """Until it is here and good, or the round is over (which cancels this)."""
        name = order.part_blob.blob.name[:12]
        try:
            while not await self._arrived(order):
                self._hooks.set_back("blob late", f"round {number} still wants blob {name}")
                await asyncio.sleep(RETRY_SECONDS)
        except (PeerFault, StorageError) as error:
            line = f"round {number} goes on here without blob {name}: {error}"
            self._hooks.set_back("blob missing", line)
            self._wishes.cancel(order.part_blob)
            return
        self._wishes.cancel(order.part_blob)
        self._feed(BlobAvailable(order.part_blob))

    async def _arrived(self, order: Fetch) -> bool:
        (blob, part), seconds = order.part_blob, self._settings.exchange_timeout
        try:
            await self._wishes.download(order.part_blob, seconds, lambda: self._offer_of(blob), self._turn_of(order))
            await self._hooks.work(self._workshop.check_part, blob, self._number, part)
        except (UnreachableError, MissingFileError):  # or it was damaged on our disk, and is removed
            return False
        return True

    async def _reduce(self, order: Reduce) -> None:
        contributions = [contribution.body for contribution in order.contributions]
        try:
            blob = await self._hooks.work(self._workshop.reduce_part, self._number, order.part, contributions)
        except (PeerFault, MissingFileError, StorageError) as error:
            line = f"part {order.part} of round {self._number} cannot be reduced here: {error}"
            self._hooks.set_back("not reduced", line)
            return
        self._feed(PartReduced(order.part, order.request_id, blob))

    def _finish(self, commit: SignedMessage[Commit]) -> None:
        assert self._machine is not None
        self._pacing.close_round(self._machine.arrival_times, commit.body.roster_peers)
        self.left_out = self._machine.left_out_blobs
        told = self._machine.last_seen if commit.sender == self._identity.peer_id else ()
        self._attendance.record_decision(self._number, self._machine.signed_decision, told, _now())
        self._end()
        self._hooks.decided(commit)

    def _end(self) -> None:
        if self._machine is not None:
            self._seen = self._machine.last_seen
        self._machine = None
        self._waiting.clear()
        self._heard.clear()
        self._wishes.cancel_all()
        self._background.cancel_all()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.next_deadline(_now()) if self._machine is not None else None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        try:
            self._feed(Tick())
        except Exception as error:
            self._hooks.broken(error)  # a timer has no caller that would hear of it
            raise

    def _turn_of(self, order: Fetch) -> int:
        """What others wait for, a sum that is made here, comes before the sums of others; and one part after the other,
        so that sums can be made, and fetched, while the contributions to the next ones are on their way. Of the sums of
        others those come first that follow ours, all around: not everybody asks the same peer first."""
        part = order.part_blob.part
        if not order.is_reduced:
            return part
        own = self._machine.parts_to_reduce if self._machine else ()
        return self._terms.parts + (part - min(own, default=0)) % self._settings.parts

    def _offer_of(self, blob: Blob) -> Signed | None:
        """Its owner's own words."""
        named = (entry for statement in self._heard.values() for entry in named_blobs(statement))
        said = (entry.message for entry in named if entry.blob == blob)
        return next((offer.signed for offer in said if isinstance(offer.body, Contribution | ReducedPart)), None)

    def _sign(self, kind: str, body: Any) -> Signed:
        return sign(self._identity, kind, self._settings.run_id, body)


def _now() -> float:
    return asyncio.get_running_loop().time()
