"""The directory of a run: gossip that keeps everybody's table of records the same.

Push-pull anti-entropy: every heartbeat a peer renews its own record and swaps with three random live peers what either
lacks, so news reach n peers in about log(n) heartbeats. What must be known at once is pushed at once. Peers that do
not answer never hold up the others: each exchange is a task of its own with its own deadline.
Whoever is silent until its record expires is gone; whom we fail to reach twice in a row counts as gone until it speaks
again. While nobody is live, and now and then otherwise (a partition has two live halves), the remembered are tried.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc

from protocol.errors import LimitError, MalformedError, PeerFault, StaleError, TransportError, UnreachableError, told
from protocol.identity import Identity, PeerId
from protocol.manifest import RunId
from protocol.membership.allowance import Allowance
from protocol.membership.clock import Clock
from protocol.membership.contacts import AddressFile, Contacts
from protocol.membership.directory import (
    KIND,
    MAX_PEERS,
    MAX_RECORD_BYTES,
    MAX_TEXT_CHARACTERS,
    Event,
    Joined,
    Left,
    Table,
    Updated,
    check_addresses,
)
from protocol.membership.own_record import FieldValue, OwnRecord
from protocol.murmur_pb2 import GossipReply, GossipRequest, PeerRecord, Signed
from protocol.murmur_pb2_grpc import MembershipServicer, MembershipStub, add_MembershipServicer_to_server
from protocol.network.transport import SOMEBODY, caller
from protocol.records import open_signed
from protocol.replies import parsed

logger = logging.getLogger(__name__)

PARTNERS = 3
URGENT_PARTNERS = 16
MAX_RECORDS = 256  # a message; with the largest records and MAX_PEERS known still below 1 MiB
FAILURES_UNTIL_SUSPECT = 2
SHORTEST_DEADLINE = 2.0  # seconds
LEAVE_SECONDS = 2.0
REUNION_SHARE = 0.2  # of heartbeats that try somebody who is not live although others are
CALLS_PER_HEARTBEAT = 8
CALL_BURST = 32


class Network(Protocol):
    """What the directory needs of the transport."""

    async def addresses(self) -> tuple[str, ...]: ...
    def introduce(self, peer: PeerId, addresses: Sequence[str], direct_port: int = 0) -> None: ...
    def forget(self, peer: PeerId) -> None: ...
    def channel(self, peer: PeerId) -> grpc.aio.Channel: ...


class Directory(MembershipServicer):
    """`heartbeat`, `expiry`: seconds. `addresses_file`: where peers' addresses outlive a restart."""

    def __init__(
        self,
        identity: Identity,
        run_id: RunId,
        transport: Network,
        clock: Clock,
        heartbeat: float,
        expiry: float,
        rng: random.Random,
        bootstrap: Sequence[str] = (),
        addresses_file: Path | None = None,
    ) -> None:
        self.peer_id = identity.peer_id
        self.refusals: Counter[str] = Counter()  # by kind of fault
        self._run_id = run_id
        self._transport = transport
        self._clock = clock
        self._heartbeat = heartbeat
        self._rng = rng
        self._deadline = max(SHORTEST_DEADLINE, 2 * heartbeat)
        self._table = Table(run_id, expiry)
        self._contacts = Contacts(bootstrap, rng)
        self._allowance = Allowance(CALL_BURST, CALLS_PER_HEARTBEAT / heartbeat)
        self._own = OwnRecord(identity, run_id, clock, expiry)
        self._seen: dict[PeerId, int] = {}
        self._failures: Counter[PeerId] = Counter()
        self._exchanges: dict[PeerId, asyncio.Task[None]] = {}
        self._again: set[PeerId] = set()
        self._subscribers: list[Callable[[Event], None]] = []
        self._address_file = AddressFile(addresses_file, time.monotonic())
        for peer, addresses in self._address_file.load().items():
            self.remember(peer, addresses)
        self._own.renew(self._table)

    def register(self, server: grpc.aio.Server) -> None:
        add_MembershipServicer_to_server(self, server)

    def publish(self, *, urgent: bool = False, **fields: FieldValue) -> None:
        """Change fields of our own record. Raises MalformedError for what no peer would accept."""
        self._own.change(fields)
        self._own.renew(self._table)
        if urgent:
            self._push()

    def live(self) -> Mapping[PeerId, PeerRecord]:
        """The peers that are there, ourselves among them."""
        return self._table.live(self._clock.now())

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        """The callback hears of every other peer that joins, leaves or changes its record."""
        self._subscribers.append(callback)

    def remember(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """A peer that may be in the run; it is asked when there is need."""
        if peer != self.peer_id and peer not in self._table.known():
            self._contacts.remember(peer, addresses, time.monotonic())

    def neighbours(self) -> Mapping[PeerId, tuple[str, ...]]:
        """The live peers and the bootstrap peers, with their addresses."""
        live = {peer: tuple(record.addresses) for peer, record in self.live().items()}
        found = {**self._contacts.bootstrap(), **live}
        return {peer: addresses for peer, addresses in found.items() if peer != self.peer_id}

    def suspect(self, peer: PeerId, reason: str) -> None:
        """A peer was found unreachable: it is not live until it speaks again."""
        if peer not in self.live() or peer == self.peer_id:
            return
        logger.warning("%s counts as gone until it speaks again: %s", peer, reason)
        self._table.suspect(peer)
        self._announce()

    async def run(self) -> None:
        """Gossip until cancelled."""
        try:
            while True:
                await self._beat()
                await asyncio.sleep(self._heartbeat * self._rng.uniform(0.9, 1.1))
        finally:
            await self._stop_exchanges()

    async def leave(self) -> None:
        """Tell the live that we go; takes at most four seconds."""
        self._address_file.save(self._contacts.addresses(), time.monotonic())
        self._own.change({"leaving": True})
        self._own.renew(self._table)
        for peer in self._others():
            self._start(peer, again=True)
        if self._exchanges:
            await asyncio.wait(self._exchanges.values(), timeout=LEAVE_SECONDS)
        await self._stop_exchanges()

    async def Gossip(self, request: GossipRequest, context: Any) -> GossipReply:  # noqa: N802
        peer = SOMEBODY
        try:
            peer = caller(context)
            return self._answer(peer, request)
        except PeerFault as fault:
            self.refuse(peer, fault)
            return await _abort(context, fault)

    def refuse(self, peer: PeerId, fault: PeerFault) -> None:
        """Count and log a call that is not answered."""
        self.refusals[fault.word] += 1
        logger.warning("a call of %s was refused: %s", peer, fault)

    def _answer(self, peer: PeerId, request: GossipRequest) -> GossipReply:
        if request.run.hex() != self._run_id:
            raise StaleError(f"{peer} gossips about another run")
        if not self._allowance.take(peer, time.monotonic()):
            raise LimitError(f"{peer} gossips more than {CALLS_PER_HEARTBEAT} times a heartbeat")
        if len(request.known) > MAX_PEERS or any(len(known) > MAX_TEXT_CHARACTERS for known in request.known):
            raise LimitError(f"{peer} claims to know {len(request.known)} peers")
        self._clock.observe_caller(peer, request.time)
        self._redate()
        self._absorb(request.records, peer)
        newer, lacking = self._table.newer_than(request.known), self._table.lacking(request.known)
        return GossipReply(time=self._clock.local(), records=self._some(newer), wanted=lacking[:MAX_RECORDS])

    def _some(self, records: list[Signed]) -> list[Signed]:
        return records if len(records) <= MAX_RECORDS else self._rng.sample(records, MAX_RECORDS)

    async def _beat(self) -> None:
        await self._refresh_addresses()
        self._own.renew(self._table)
        self._expire()
        self._announce()
        others = self._others()
        for peer in self._rng.sample(others, min(PARTNERS, len(others))):
            self._start(peer)
        if not others or self._rng.random() < REUNION_SHARE:
            self._try_contacts(1 if others else PARTNERS)
        self._address_file.keep(self._contacts.addresses(), time.monotonic())

    def _expire(self, caller_now: PeerId | None = None) -> None:
        for peer in self._table.expire(self._clock.now()):
            self._failures.pop(peer, None)
            # To forget cuts the connection: not that of a peer that is back after a long sleep and speaks to us.
            if peer not in (self.peer_id, caller_now):
                self._transport.forget(peer)

    async def _refresh_addresses(self) -> None:
        try:
            async with asyncio.timeout(self._deadline):
                addresses = await self._transport.addresses()
        except (TimeoutError, TransportError, UnreachableError) as error:
            logger.warning("our own addresses cannot be read now (%s); the last ones stay", told(error))
            return
        self._own.move(addresses)

    def _others(self) -> list[PeerId]:
        return [peer for peer in self.live() if peer != self.peer_id]

    def _push(self) -> None:
        others = self._others()
        for peer in self._rng.sample(others, min(URGENT_PARTNERS, len(others))):
            self._start(peer, again=True)

    def _try_contacts(self, count: int) -> None:
        present = {*self._others(), self.peer_id, *self._exchanges}
        for contact in self._contacts.due(time.monotonic(), present, count, is_alone=not self._others()):
            try:
                self._transport.introduce(contact.peer, contact.addresses)
            except MalformedError as error:
                self._failed(contact.peer, error)
                continue
            self._start(contact.peer)

    def _start(self, peer: PeerId, again: bool = False) -> None:
        """Exchange with a peer; if that is under way, once more afterwards where `again` asks for it."""
        if peer not in self._exchanges:
            self._exchanges[peer] = asyncio.create_task(self._converse(peer))
        elif again:
            self._again.add(peer)

    async def _converse(self, peer: PeerId) -> None:
        try:
            await self._swap(peer)
            while peer in self._again:
                self._again.discard(peer)
                await self._swap(peer)
        except (grpc.aio.AioRpcError, UnreachableError, PeerFault) as error:
            self._failed(peer, error)
        else:
            self._failures.pop(peer, None)
            self._contacts.succeeded(peer, time.monotonic())
        finally:
            self._again.discard(peer)
            self._exchanges.pop(peer, None)

    async def _swap(self, peer: PeerId) -> None:
        wanted = await self._exchange(peer, [self.peer_id])
        if self._redate():
            wanted.append(self.peer_id)
        if wanted:
            await self._exchange(peer, wanted)

    def _redate(self) -> bool:
        misdated = self._own.misdated()
        if misdated:
            logger.info("our clock is %.1f s from the swarm's; our record is dated anew", -self._clock.offset)
            self._own.renew(self._table)
        return misdated

    async def _exchange(self, peer: PeerId, pushed: Sequence[PeerId]) -> list[PeerId]:
        """The peers of whom the other side wants our record."""
        sent = self._clock.local()
        request = GossipRequest(
            run=bytes.fromhex(self._run_id),
            time=sent,
            known=self._table.known(),
            records=self._table.records(pushed),
        )
        stub = MembershipStub(self._transport.channel(peer))
        reply: GossipReply = parsed(await stub.Gossip(request, timeout=self._deadline))
        self._clock.observe(peer, reply.time, sent, self._clock.local())
        self._absorb(reply.records, peer)
        return [wanted for wanted in reply.wanted[:MAX_RECORDS] if wanted != self.peer_id]

    def _failed(self, peer: PeerId, error: Exception) -> None:
        reason = _in_words(error)
        self._failures[peer] += 1
        live = peer in self.live()
        if live and _silent(error) and self._failures[peer] >= FAILURES_UNTIL_SUSPECT:
            self.suspect(peer, f"no answer in {self._failures[peer]} attempts: {reason}")
        elif live:
            logger.info("gossip with %s failed: %s", peer, reason)
        else:
            del self._failures[peer]
            wait = self._contacts.failed(peer, time.monotonic())
            tried = " ".join(self._contacts.addresses().get(peer, ()))
            level = logging.WARNING if self._contacts.is_worth_a_word(peer) else logging.DEBUG
            logger.log(level, "no answer from %s at %s (%s); trying again in %.0f s", peer, tried, reason, wait)

    def _absorb(self, records: Sequence[Signed], sender: PeerId) -> None:
        if len(records) > MAX_RECORDS:
            raise LimitError(f"{sender} sent {len(records)} records at once, of at most {MAX_RECORDS}")
        self._expire(sender)
        faults = [fault for signed in records if (fault := self._merge(signed)) is not None]
        self.refusals.update(fault.word for fault in faults)
        if faults:
            logger.warning("%d records from %s were refused; the first: %s", len(faults), sender, faults[0])
        self._announce()

    def _merge(self, signed: Signed) -> PeerFault | None:
        try:
            record = self._table.merge(signed, self._clock.now())
            if record is not None:
                self._learn(signed.peer, record)
        except StaleError as fault:
            self._note_untimely(signed)
            return fault
        except PeerFault as fault:
            return fault
        return None

    def _note_untimely(self, signed: Signed) -> None:
        """While nobody is live, our own clock may be what is wrong: whose record this is can help to find the time."""
        if signed.peer == self.peer_id or self._others():
            return
        try:
            record = open_signed(signed, self._run_id, KIND, PeerRecord, MAX_RECORD_BYTES)
            check_addresses(signed.peer, record.addresses)
        except PeerFault as fault:
            logger.info("an untimely record was of no use either: %s", fault)
        else:
            self._contacts.remember(signed.peer, record.addresses, time.monotonic())

    def _learn(self, peer: PeerId, record: PeerRecord) -> None:
        if peer == self.peer_id:
            logger.info("a record of our own key is about from elsewhere or an earlier life; ours overrides it")
            self._own.renew(self._table)
            return
        self._failures.pop(peer, None)
        self._contacts.remember(peer, record.addresses, time.monotonic())
        if not record.leaving:
            self._transport.introduce(peer, tuple(record.addresses), record.direct_port)

    def _announce(self) -> None:
        """Tell the subscribers what has changed since the last time."""
        live = {peer: record for peer, record in self.live().items() if peer != self.peer_id}
        events: list[Event] = [Left(peer, self._table.fate(peer)) for peer in self._seen.keys() - live.keys()]
        for peer, record in live.items():
            if peer not in self._seen:
                events.append(Joined(peer, record))
            elif record.sequence != self._seen[peer]:
                events.append(Updated(peer, record))
        self._seen = {peer: record.sequence for peer, record in live.items()}
        for event in events:
            if not isinstance(event, Updated):
                logger.info("%s", _line(event))
            for callback in self._subscribers:
                callback(event)

    async def _stop_exchanges(self) -> None:
        tasks = list(self._exchanges.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_SECONDS)


def _in_words(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    # What gRPC says of these is about sockets of ours.
    ours = {grpc.StatusCode.UNAVAILABLE: "cannot be reached", grpc.StatusCode.DEADLINE_EXCEEDED: "nothing in time"}
    return ours.get(error.code()) or str(error.details())


def _silent(error: Exception) -> bool:
    """Whether a failure says that the peer is not there; one that refuses us is."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return isinstance(error, UnreachableError)


async def _abort(context: Any, fault: PeerFault) -> NoReturn:
    codes = {LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED, StaleError: grpc.StatusCode.FAILED_PRECONDITION}
    await context.abort(codes.get(type(fault), grpc.StatusCode.INVALID_ARGUMENT), str(fault))
    raise AssertionError("abort always raises")


def _line(event: Joined | Left | Updated) -> str:
    return f"{event.peer} {event.reason}" if isinstance(event, Left) else f"{event.peer} joined"
