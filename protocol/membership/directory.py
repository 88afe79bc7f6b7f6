"""The directory of a run: gossip that gives all peers the same table of records.

Push-pull anti-entropy: at every heartbeat a peer exchanges with three random live peers the records that either lacks,
so news reach n peers in about log(n) heartbeats. A peer signs its own record again when it has news, and a few times
before it expires. Urgent changes are pushed at once. A peer that does not answer never delays the others, because each
exchange is a task with its own deadline.

A peer that is silent until its record expires is gone. A peer that we cannot reach twice in a row, or whose machine
says that its process has ended, counts as gone until it speaks again. While no peer is live, and from time to time
otherwise (each half of a partition has live peers), the directory tries its remembered contacts, but none that said
goodbye.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import grpc

from protocol.errors import (
    LimitError,
    MalformedError,
    NewcomerError,
    PeerFault,
    StaleError,
    TransportError,
    UnreachableError,
    describe_error,
    require_reply,
)
from protocol.identity import Identity, PeerId
from protocol.membership.clock import SwarmClock
from protocol.membership.contacts import AddressFile
from protocol.membership.gossip import (
    MAX_RECORDS,
    DirectoryOptions,
    GossipTransport,
    abort_call,
    describe_call_error,
    is_unreachable,
    make_reply,
    make_request,
)
from protocol.membership.known_peers import KnownPeers, OtherNode
from protocol.membership.peer_table import (
    MAX_PEERS,
    FieldValue,
    MembershipListener,
)
from protocol.membership.summary import SALT_BYTES, Summary
from protocol.murmur_pb2 import GossipReply, GossipRequest, PeerRecord
from protocol.murmur_pb2_grpc import MembershipServicer, MembershipStub, add_MembershipServicer_to_server
from protocol.tasks import run_periodically
from protocol.traffic import ControlTraffic
from protocol.transport.rate_limit import TokenBuckets
from protocol.transport.transport import UNKNOWN_CALLER, caller

logger = logging.getLogger(__name__)

GOSSIP_FANOUT = 3
URGENT_FANOUT = 16
FAILURES_UNTIL_SUSPECT = 2
MIN_TIMEOUT_SECONDS = 2.0
LEAVE_SECONDS = 2.0
CONTACT_RETRY_PROBABILITY = 0.2  # of a heartbeat that tries a contact although some peers are live
MAX_CALLS_PER_HEARTBEAT = 8
CALL_BURST = 32
REPORT_PAUSE, MAX_REPORT_PAUSE_SECONDS = 4.0, 2.0  # after a report of changes, in times of its length
RECORDS_PER_CALL = 32  # a call with more of them counts as several


class PeerDirectory(MembershipServicer):
    """The live peers of one run, kept current by gossip.

    A node has one directory, shared by its replicas.
    """

    def __init__(
        self,
        options: DirectoryOptions,
        identity: Identity,
        transport: GossipTransport,
        clock: SwarmClock,
        rng: random.Random,
    ) -> None:
        heartbeat = options.heartbeat
        self.peer_id = identity.peer_id
        self.run_id = options.run_id
        self.refusals: Counter[str] = Counter()  # by metric label
        self.traffic = ControlTraffic()
        self._transport = transport
        self._clock = clock
        self._heartbeat = heartbeat
        self._rng = rng
        self._timeout = max(MIN_TIMEOUT_SECONDS, 2 * heartbeat)
        self._known = KnownPeers(options, identity, clock, rng)
        self._contacts = self._known.contacts
        self._call_buckets = TokenBuckets(CALL_BURST, MAX_CALLS_PER_HEARTBEAT / heartbeat)
        self._failures: Counter[PeerId] = Counter()
        self._exchanges: dict[PeerId, asyncio.Task[None]] = {}
        self._end_checks: dict[PeerId, asyncio.Task[None]] = {}
        self._repeat_exchanges: set[PeerId] = set()
        self._unresolved: set[PeerId] = set()  # peers of which we hold another version than an update changes
        self._next_report_at = float("-inf")  # of changes to the listeners
        self._report_timer: asyncio.TimerHandle | None = None
        self._address_file = AddressFile(options.addresses_file, time.monotonic())
        for peer, addresses in self._address_file.load().items():
            self.add_contact(peer, addresses)
        self._clock.count_only(frozenset(), frozenset(self._contacts.bootstrap()))
        self._known.renew()

    @property
    def start(self) -> int:
        """Return the id of this process, which our record has too."""
        return self._known.own.start

    def register(self, server: grpc.aio.Server) -> None:
        add_MembershipServicer_to_server(self, server)

    def publish(self, *, urgent: bool = False, **fields: FieldValue) -> None:
        """Change fields of our own record.

        Raises MalformedError if peers would refuse them.
        """
        self._known.publish(fields)
        if urgent:
            self._push_own_record()

    def update(self, **fields: FieldValue) -> None:
        """Change figures in our own record; its next renewal carries them. Raises MalformedError as `publish` does."""
        self._known.update(fields)

    def live(self) -> Mapping[PeerId, PeerRecord]:
        """Return the live peers, including ourselves."""
        return self._known.live()

    def subscribe(self, listener: MembershipListener) -> None:
        """Report every other peer that joins, leaves or changes its record to `listener`."""
        self._known.subscribe(listener)

    def set_voters(self, voters: frozenset[PeerId]) -> None:
        """Set the peers that have a vote; empty while nobody has one yet."""
        self._known.set_voters(voters)
        self._clock.count_only(voters, frozenset(self._contacts.bootstrap()))
        self._transport.set_voters(voters | self._contacts.bootstrap().keys() if voters else voters)

    def other_node_with_our_key(self) -> OtherNode | None:
        """Return another node that runs now with our key, such as one in a copied folder."""
        return self._known.key_conflict.other(time.monotonic())

    def add_contact(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember a peer that may be in the run; it is tried when needed."""
        if peer != self.peer_id and peer not in self._known.table:
            self._contacts.add(peer, addresses, time.monotonic())

    def known_addresses(self) -> Mapping[PeerId, tuple[str, ...]]:
        """Return the live peers and the bootstrap peers with their addresses."""
        live = {peer: tuple(record.addresses) for peer, record in self.live().items()}
        known = {**self._contacts.bootstrap(), **live}
        return {peer: addresses for peer, addresses in known.items() if peer != self.peer_id}

    def suspect(self, peer: PeerId, reason: str) -> None:
        """Treat an unreachable peer as not live until it speaks again."""
        if peer not in self.live() or peer == self.peer_id:
            return
        logger.debug("%s counts as gone until it speaks again: %s", peer, reason)
        self._known.table.suspect(peer)
        self._notify_listeners()
        self._start_end_check(peer)

    async def run(self) -> None:
        """Gossip until cancelled. Raises KeyInUseError if another node uses our key and started earlier."""
        try:
            await run_periodically(lambda: self._heartbeat * self._rng.uniform(0.9, 1.1), self._run_heartbeat)
        finally:
            await self._stop_exchanges()

    async def leave(self) -> None:
        """Tell the live peers that we leave; takes at most four seconds.

        Nothing is said while another node uses our key, because peers would take that one for gone.
        """
        self._address_file.save(self._contacts.addresses(), time.monotonic())
        if self.other_node_with_our_key():
            return await self._stop_exchanges()
        self._known.publish({"leaving": True})
        for peer in self._known.other_live_peers():
            self._start_exchange(peer, repeat=True)
        if self._exchanges:
            await asyncio.wait(self._exchanges.values(), timeout=LEAVE_SECONDS)
        await self._stop_exchanges()

    async def Gossip(self, request: GossipRequest, context: Any) -> GossipReply:  # noqa: N802
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            reply = self._answer_gossip(peer, request)
            self.traffic.record_received("gossip", request)
            self.traffic.record_sent("gossip", reply)
            return reply
        except PeerFault as fault:
            self.record_refusal(peer, fault)
            return await abort_call(context, fault)

    def record_refusal(self, peer: PeerId, fault: PeerFault) -> None:
        """Count and log a refused call."""
        self.refusals[fault.metric_label] += 1
        logger.warning("refusing a call of %s: %s", peer, fault)

    def _answer_gossip(self, peer: PeerId, request: GossipRequest) -> GossipReply:
        if request.run.hex() != self.run_id:
            raise StaleError(f"{peer} gossips about another run")
        cost = max(1.0, (len(request.records) + len(request.updates)) / RECORDS_PER_CALL)
        if not self._call_buckets.try_take(peer, time.monotonic(), cost):
            raise LimitError(f"{peer} gossips more than {MAX_CALLS_PER_HEARTBEAT} times a heartbeat")
        summary = Summary.from_bytes(request.salt, request.known, MAX_PEERS) if request.salt else None
        self._clock.observe_caller(peer, request.time)
        self._known.renew_if_misdated()
        self._merge_records(request, peer)
        reply = GossipReply()
        if summary is not None:
            table = self._known.table
            others = table.other_record_of(peer, self._clock.now())
            reply = make_reply(table, summary, others, self.peer_id, self._rng)
        reply.time, reply.counts_caller = self._clock.local(), self._clock.counts(peer)
        return reply

    async def _run_heartbeat(self) -> None:
        await self._refresh_addresses()
        self._known.renew_if_due()
        self._expire_records()
        self._notify_listeners()
        others = self._known.other_live_peers()
        for peer in self._rng.sample(others, min(GOSSIP_FANOUT, len(others))):
            self._start_exchange(peer)
        if not others or self._rng.random() < CONTACT_RETRY_PROBABILITY:
            self._try_contacts(1 if others else GOSSIP_FANOUT)
        if unconfirmed := self._known.table.unconfirmed():
            self._try_contacts(GOSSIP_FANOUT, unconfirmed)
        self._address_file.save_if_due(self._contacts.addresses(), time.monotonic())
        self._known.key_conflict.check(time.monotonic())

    def _expire_records(self, current_caller: PeerId | None = None) -> None:
        for peer in self._known.table.expire(self._clock.now()):
            self._failures.pop(peer, None)
            # Forgetting cuts the connection, so spare a peer that is back after a long sleep and is calling us now.
            if peer not in (self.peer_id, current_caller):
                self._transport.forget(peer)

    async def _refresh_addresses(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                addresses = await self._transport.addresses()
        except (TimeoutError, TransportError, UnreachableError) as error:
            logger.warning("cannot read our own addresses now (%s); keeping the last ones", describe_error(error))
            return
        self._known.own.set_addresses(addresses)

    def _push_own_record(self) -> None:
        others = self._known.other_live_peers()
        for peer in self._rng.sample(others, min(URGENT_FANOUT, len(others))):
            self._start_exchange(peer, repeat=True)

    def _try_contacts(self, count: int, among: Collection[PeerId] | None = None) -> None:
        others = self._known.other_live_peers()
        busy = {*others, self.peer_id, *self._exchanges}
        for contact in self._contacts.pick_due(time.monotonic(), busy, count, not others, among):
            try:
                self._transport.introduce(contact.peer, contact.addresses)
            except MalformedError as error:
                self._record_failure(contact.peer, error)
                continue
            self._start_exchange(contact.peer)

    def _start_exchange(self, peer: PeerId, repeat: bool = False) -> None:
        """Start an exchange with a peer.

        If one is running and `repeat` is set, another one runs after it.
        """
        if peer not in self._exchanges:
            self._exchanges[peer] = asyncio.create_task(self._run_exchange(peer))
        elif repeat:
            self._repeat_exchanges.add(peer)

    async def _run_exchange(self, peer: PeerId) -> None:
        try:
            await self._exchange_records(peer)
            while peer in self._repeat_exchanges:
                self._repeat_exchanges.discard(peer)
                await self._exchange_records(peer)
        except (grpc.aio.AioRpcError, UnreachableError, PeerFault) as error:
            self._record_failure(peer, error)
        else:
            self._failures.pop(peer, None)
            self._contacts.record_success(peer, time.monotonic())
        finally:
            self._repeat_exchanges.discard(peer)
            self._exchanges.pop(peer, None)

    async def _exchange_records(self, peer: PeerId) -> None:
        sequences = self._known.table.known_sequences()
        for unresolved in self._unresolved:
            sequences.pop(unresolved, None)  # so it comes in full
        self._unresolved.clear()
        summary = Summary.of(sequences, self._rng.randbytes(SALT_BYTES))
        reply = await self._call_gossip(peer, self._known.own_version_at(peer), summary)
        asked = Summary.from_bytes(summary.salt, reply.wanted, MAX_RECORDS)
        wanted = asked.known_of(sequences)
        if self._known.renew_if_misdated():
            wanted[self.peer_id] = 0
        if wanted:
            await self._call_gossip(peer, wanted)

    async def _call_gossip(
        self, peer: PeerId, pushed: Mapping[PeerId, int], summary: Summary | None = None
    ) -> GossipReply:
        """Send records to a peer, and learn those that the summary of our table lacks; none without a summary.

        Args:
            pushed: the peers whose records we send, with the sequences that the receiver has (0: none).
        """
        sent = self._clock.local()
        request = make_request(bytes.fromhex(self.run_id), sent, self._known.table, pushed, summary)
        stub = MembershipStub(self._transport.channel(peer))
        self.traffic.record_sent("gossip", request)
        reply: GossipReply = require_reply(await stub.Gossip(request, timeout=self._timeout))
        self.traffic.record_received("gossip", reply)
        self._clock.observe(peer, reply.time, sent, self._clock.local(), reply.counts_caller)
        self._merge_records(reply, peer)
        return reply

    def _record_failure(self, peer: PeerId, error: Exception) -> None:
        reason = describe_call_error(error)
        self._failures[peer] += 1
        is_live = peer in self.live()
        if is_live and is_unreachable(error):
            self._start_end_check(peer)
        if is_live and is_unreachable(error) and self._failures[peer] >= FAILURES_UNTIL_SUSPECT:
            self.suspect(peer, f"no answer in {self._failures[peer]} attempts: {reason}")
        elif is_live:
            logger.debug("gossip with %s failed: %s", peer, reason)
        else:
            del self._failures[peer]
            wait = self._contacts.record_failure(peer, time.monotonic())
            tried = " ".join(self._contacts.addresses().get(peer, ()))
            level = logging.WARNING if self._contacts.should_warn(peer) else logging.DEBUG
            logger.log(level, "no answer from %s at %s (%s); trying again in %.0f s", peer, tried, reason, wait)

    def _start_end_check(self, peer: PeerId) -> None:
        if peer not in self._end_checks:
            self._end_checks[peer] = asyncio.create_task(self._check_end(peer))

    async def _check_end(self, peer: PeerId) -> None:
        """Ask the machine of a peer that does not answer; it may be back meanwhile, with another record."""
        table = self._known.table
        sequence = table.sequence_of(peer)
        try:
            if await self._transport.has_ended(peer) and table.sequence_of(peer) == sequence:
                table.end(peer)
                self._notify_listeners()
        finally:
            self._end_checks.pop(peer, None)

    def _merge_records(self, message: GossipRequest | GossipReply, sender: PeerId) -> None:
        count = len(message.records) + len(message.updates)
        if count > MAX_RECORDS:
            raise LimitError(f"{sender} sent {count} records at once; at most {MAX_RECORDS} are allowed")
        self._expire_records(sender)
        restored, unresolved = self._known.table.restore(message.updates)
        self._unresolved.update(unresolved)
        merged = self._known.merge([*message.records, *restored], sender, time.monotonic())
        for peer, record in merged.news.items():
            self._learn_peer(peer, record)
        self._record_faults(merged.faults, sender)
        if merged.is_own_record_urgent:
            self._push_own_record()
        self._notify_listeners()

    def _learn_peer(self, peer: PeerId, record: PeerRecord) -> None:
        self._failures.pop(peer, None)
        if not record.leaving:
            self._transport.introduce(peer, tuple(record.addresses), record.direct_port)

    def _record_faults(self, faults: Sequence[PeerFault], sender: PeerId) -> None:
        self.refusals.update(fault.metric_label for fault in faults)
        # A record may expire on its way; but if no peer is live, our own clock may be wrong. Newcomers come again.
        is_timely = any(not isinstance(fault, StaleError | NewcomerError) for fault in faults)
        if is_timely or (faults and not self._known.other_live_peers()):
            logger.warning("refused %d records from %s; the first: %s", len(faults), sender, faults[0])

    def _notify_listeners(self) -> None:
        """Report changes at once, or soon if the last report took long.

        So the listeners, each of which looks at all live peers, take a fifth of the time at most.
        """
        wait = self._next_report_at - time.monotonic()
        if wait <= 0:
            self._report_changes()
        elif self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(wait, self._report_changes)

    def _report_changes(self) -> None:
        self._report_timer, began = None, time.monotonic()
        self._known.notify_listeners()
        ended = time.monotonic()
        self._next_report_at = ended + min(REPORT_PAUSE * (ended - began), MAX_REPORT_PAUSE_SECONDS)

    async def _stop_exchanges(self) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        tasks = [*self._exchanges.values(), *self._end_checks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_SECONDS)
