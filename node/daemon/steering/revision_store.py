"""Store the organiser's revisions of a node's run on disk, and exchange them with the peers.

A peer's record names the newest revision that it knows. A node that does not know this revision asks the peer for its
list. So a revision spreads from any peer to all others, and a peer that was away gets it when it returns.
"""

import asyncio
import base64
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc

from node.daemon.peers.peer_rpc import ChannelTo, await_reply
from node.run_dir import read_json_if_whole
from protocol.consensus.messages.signed import Digest
from protocol.errors import ForgedError, LimitError, PeerFault, StaleError, StorageError, UnreachableError
from protocol.files import write_atomically
from protocol.identity import PeerId
from protocol.manifest.run import Manifest, RunId
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip import abort_call
from protocol.membership.peer_table import MembershipEvent, PeerLeft
from protocol.murmur_pb2 import PeerRecord, RevisionsReply, RevisionsRequest, Signed
from protocol.murmur_pb2_grpc import SteeringServicer, SteeringStub, add_SteeringServicer_to_server
from protocol.recent import RecentTable
from protocol.steering import (
    MAX_STORED,
    NO_REVISION,
    RevisionLog,
    SignedRevision,
    describe_revision,
    open_revision,
)
from protocol.transport.rate_limit import TokenBuckets
from protocol.transport.transport import UNKNOWN_CALLER, caller

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
RETRY_SECONDS = 5.0  # before the same peer is asked again
MAX_ASKED = 4096  # peers
MAX_FETCHES = 8  # at the same time
CALL_BURST, CALLS_PER_SECOND = 16, 2.0  # per caller
SMOOTHING = 0.3


class RoundClock:
    """The highest announced round, and the mean time of a round in seconds; 0 while it is unknown."""

    def __init__(self) -> None:
        self.round = 0
        self.seconds = 0.0
        self._since: float | None = None

    def observe(self, round_number: int, now: float) -> None:
        """Record a round that a peer announces."""
        if round_number <= self.round:
            return
        if self._since is not None:
            each = (now - self._since) / (round_number - self.round)
            self.seconds = each if not self.seconds else SMOOTHING * each + (1 - SMOOTHING) * self.seconds
        self.round, self._since = round_number, now


async def exchange_revisions(
    run_id: RunId, channel: ChannelTo, peer: PeerId, revisions: Sequence[Signed]
) -> RevisionsReply:
    """Send revisions to a peer, and return its reply with all revisions that it knows.

    Raises UnreachableError, or PeerFault for a refusal or too long a reply.
    """
    request = RevisionsRequest(run=bytes.fromhex(run_id), revisions=revisions)
    reply: RevisionsReply = await await_reply(
        peer, lambda: SteeringStub(channel(peer)).Revisions(request, timeout=CALL_SECONDS)
    )
    if len(reply.revisions) > MAX_STORED:
        raise LimitError(f"{peer} replied with {len(reply.revisions)} revisions; at most {MAX_STORED}")
    return reply


class RevisionStore(SteeringServicer):
    """Stores the revisions of one run; the node owns it, and its replicas read `log`.

    Args:
        manifest: the manifest of the run as it began.
        path: the file of the revisions.
        directory: the peers of the run.
        channel: the channels to them.
    """

    def __init__(self, manifest: Manifest, path: Path, directory: PeerDirectory, channel: ChannelTo) -> None:
        self.log = RevisionLog()
        self.clock = RoundClock()
        self.adopted: Digest = NO_REVISION
        self._run_id = manifest.run_id
        self._organiser = manifest.run.organiser_key
        self._path = path
        self._directory = directory
        self._channel = channel
        self._listeners: list[Callable[[], None]] = []
        self._asked_at = RecentTable[PeerId, float](MAX_ASKED)
        self._fetches: set[asyncio.Task[None]] = set()
        self._buckets = TokenBuckets(CALL_BURST, CALLS_PER_SECOND)
        self._load()
        self._saved_count = len(self.log.revisions)

    def _load(self) -> None:
        """Load the revisions of the last start; peers send damaged ones again."""
        texts = read_json_if_whole(self._path).get("revisions")
        for text in texts if isinstance(texts, list) else ():
            try:
                self.log.add(self._open(Signed.FromString(base64.b64decode(text))))
            except (PeerFault, ValueError, TypeError) as error:
                logger.warning("skipping a revision in %s: %s", self._path, error)

    def register(self, server: grpc.aio.Server) -> None:
        add_SteeringServicer_to_server(self, server)

    def subscribe(self, on_revisions_changed: Callable[[], None]) -> None:
        """Call a function whenever the log has new revisions."""
        self._listeners.append(on_revisions_changed)

    def describe(self) -> tuple[str, ...]:
        """Describe each known revision in a line."""
        return tuple(describe_revision(entry.body) for entry in self.log.revisions)

    def announce(self) -> None:
        """Announce the newest revision in our record."""
        self._directory.subscribe(self)
        self._publish()

    def _publish(self) -> None:
        if self.log.revisions:
            self._directory.publish(urgent=True, revision=self.log.newest(self.adopted))

    def adopt(self, revision: Digest) -> None:
        """Record the newest revision that our chain has adopted, and save the revisions that came with it."""
        self.adopted = revision
        self._save_new()

    def _save_new(self) -> None:
        """Save and announce revisions that were added to the log since the last call."""
        if len(self.log.revisions) == self._saved_count:
            return
        self._saved_count = len(self.log.revisions)
        encoded = [base64.b64encode(entry.signed.SerializeToString()).decode() for entry in self.log.revisions]
        try:
            write_atomically(self._path, json.dumps({"revisions": encoded}).encode())
        except StorageError as error:  # they are in memory, and peers have them
            logger.warning("cannot save the organiser's revisions: %s", error)
        self._publish()

    def add(self, envelopes: Iterable[Signed]) -> None:
        """Add revisions from a peer, oldest first. Raises PeerFault."""
        learned: list[SignedRevision] = []
        try:
            for signed in envelopes:
                revision = self._open(signed)
                if (result := self.log.add(revision)) == "known":
                    continue
                learned.append(revision)
                if result == "conflict":
                    logger.warning("the organiser signed two revisions %d; see murmur steer", revision.body.number)
        finally:
            if learned:
                for revision in learned:
                    logger.info("the organiser's revision %s", describe_revision(revision.body))
                self._save_new()
                for listener in self._listeners:
                    listener()

    def _open(self, signed: Signed) -> SignedRevision:
        if not self._organiser:
            raise ForgedError("a revision of a run without run.organiser_key")
        return open_revision(signed, self._run_id, self._organiser)

    async def Revisions(self, request: RevisionsRequest, context: Any) -> RevisionsReply:  # noqa: N802
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            self._admit(peer, request)
            self.add(request.revisions)
        except PeerFault as fault:
            self._directory.record_refusal(peer, fault)
            return await abort_call(context, fault)
        return RevisionsReply(
            revisions=[entry.signed for entry in self.log.revisions],
            round=self.clock.round,
            round_seconds=self.clock.seconds,
            adopted=self.adopted,
        )

    def _admit(self, peer: PeerId, request: RevisionsRequest) -> None:
        if request.run.hex() != self._run_id:
            raise StaleError(f"{peer} steers another run")
        if not self._buckets.try_take(peer, time.monotonic()):
            raise LimitError(f"{peer} asks for revisions too often")
        if len(request.revisions) > MAX_STORED:
            raise LimitError(f"{peer} sent {len(request.revisions)} revisions; at most {MAX_STORED}")

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        for event in events:
            if not isinstance(event, PeerLeft):
                self._observe(event.peer, event.record)

    def _observe(self, peer: PeerId, record: PeerRecord) -> None:
        self.clock.observe(record.round, time.monotonic())
        if len(self._fetches) < MAX_FETCHES and self._should_ask(peer, record):
            task = asyncio.create_task(self._fetch_from(peer), name="revisions")
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)

    def _should_ask(self, peer: PeerId, record: PeerRecord) -> bool:
        now = time.monotonic()
        if not self._organiser or record.revision in self.log:
            return False
        if now < self._asked_at.get(peer, float("-inf")) + RETRY_SECONDS:
            return False
        self._asked_at[peer] = now
        return True

    async def _fetch_from(self, peer: PeerId) -> None:
        try:
            self.add((await exchange_revisions(self._run_id, self._channel, peer, ())).revisions)
        except UnreachableError as error:
            logger.debug("cannot fetch revisions: %s", error)
        except PeerFault as fault:
            self._directory.record_refusal(peer, fault)
