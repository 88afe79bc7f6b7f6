"""Show our chain, and ask other peers for theirs with the certificates of the commits; ask the contacts about them.

The signatures are checked here; `protocol.consensus.fork_choice` judges the chains.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from node.daemon.peers.peer_rpc import ChannelTo, request_chain
from node.daemon.peers.swarm_view import SwarmView
from node.loop.peers.catch_up import RETAINED_ROUNDS, SyncOffer
from node.loop.steering import Steering
from protocol.blobs.blob import Blob, check_digest
from protocol.consensus.chain import MAX_KEPT_COMMITS, CertifiedCommit, Chain, ChainHead, ChainLog, open_certified
from protocol.consensus.fork_choice import ChainOffer
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.messages.kinds import nested_parser
from protocol.errors import MalformedError, PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.manifest.sections import AdmissionSection
from protocol.murmur_pb2 import ChainReply
from protocol.signing import MAX_CHAIN_TOKENS, MAX_ROUND, TrustPoint
from protocol.steering import MAX_REVISIONS, SignedRevision, open_revision

MAX_PAGES = 64  # replies of one peer for one chain
MAX_ASKED_CONTACTS = 8
WORD_ROUNDS = 16  # by which the chains of two peers that agree may differ in length


@dataclass(frozen=True)
class ServedChain:
    """A chain that this node shows to other peers.

    Args:
        chain: the chain.
        state: returns the blob of the state at its head, None before there is one.
        steering: has the revisions of the manifest that the chain has adopted.
        has_shared_state: whether all peers on one head hold the same state.
        decided: returns the commit after the head that is decided but not applied yet.
    """

    chain: Chain
    state: Callable[[], Blob | None]
    steering: Steering
    has_shared_state: bool = True
    decided: Callable[[], CertifiedCommit | None] = lambda: None

    @property
    def trust_point(self) -> TrustPoint | None:
        """Return the trust point at the head; None before the first round."""
        chain, blob = self.chain, self.state()
        if not chain.round or blob is None:
            return None
        state = blob.digest if self.has_shared_state else b""
        return TrustPoint.of(chain.round, chain.digest, state, chain.electorate.digest)


class ShownChain(NamedTuple):
    """The chain of a peer as it shows it: its head, the commits that lead to it, and the blob of its state.

    `decided`: the commit after the head that is not applied yet.
    """

    head: ChainHead
    log: ChainLog
    state: Blob | None
    revisions: tuple[SignedRevision, ...]
    decided: CertifiedCommit | None = None


class ChainReader:
    """Requests chains from the peers of a run.

    Args:
        run_id: the run.
        limits: those of its contributions.
        channel: returns the channel to a peer.
        rule: the run's rule of admission.
    """

    def __init__(self, run_id: RunId, limits: ContributionLimits, channel: ChannelTo, rule: AdmissionSection) -> None:
        self._run_id = run_id
        self._limits = limits
        self._channel = channel
        self._rule = rule

    async def read(self, peer: PeerId, after_round: int) -> ShownChain:
        """Return the chain of a peer up to its head, from the commit of round `after_round` on or the oldest it keeps.

        Raises UnreachableError if the peer does not answer, PeerFault if it sends anything but a chain.
        """
        shown = await self._read_page(peer, after_round)
        for _ in range(MAX_PAGES):
            if not shown.log.commits or shown.log.commits[-1].body.round >= shown.head.round - 1:
                return shown
            page = await self._read_page(peer, shown.log.commits[-1].body.round + 1)
            if not page.log.commits:
                break
            log = ChainLog(shown.log.electorate, (*shown.log.commits, *page.log.commits))
            shown = page._replace(log=log)
        raise MalformedError(f"the commits of {peer} do not lead to its head")

    async def _read_page(self, peer: PeerId, after_round: int) -> ShownChain:
        reply = await request_chain(self._run_id, self._channel, peer, after_round)
        head, open_nested = _parse_head(reply), nested_parser(self._run_id, self._limits)
        # A chain of a thousand peers has a hundred thousand signatures.
        log = await asyncio.to_thread(ChainLog.from_wire, reply.log, self._rule, self._limits, open_nested)
        state = Blob.from_wire(reply.state) if reply.HasField("state") else None
        decided = open_certified(reply.decided, self._limits, open_nested) if reply.HasField("decided") else None
        return ShownChain(head, log, state, self._open_revisions(reply), decided)

    def _open_revisions(self, reply: ChainReply) -> tuple[SignedRevision, ...]:
        if len(reply.revisions) > MAX_REVISIONS:
            raise MalformedError(f"{len(reply.revisions)} revisions in one reply; at most {MAX_REVISIONS}")
        whole_run = self._limits.whole_run or self._run_id
        return tuple(open_revision(signed, whole_run, self._limits.organiser) for signed in reply.revisions)


class ChainSyncClient:
    """Asks peers for the chain to follow.

    Args:
        reader: reads the chains.
        chain: our own.
        contacts: the peers that the user named.
        swarm_view: knows the peers to ask where no contact serves our stage.
        state_bytes: the size of every state of this run.
        has_shared_state: whether all peers on one head hold the same state.
    """

    def __init__(
        self,
        reader: ChainReader,
        chain: Chain,
        contacts: Sequence[PeerId],
        swarm_view: SwarmView,
        state_bytes: int,
        has_shared_state: bool,
    ) -> None:
        self._reader = reader
        self._chain = chain
        self._contacts = contacts
        self._swarm_view = swarm_view
        self._state_bytes = state_bytes
        self._has_shared_state = has_shared_state

    async def ask(self, peer: PeerId, since: int) -> SyncOffer:
        """Return the chain of `peer`, and the word of the contacts if nothing else can vouch for it.

        Args:
            peer: the peer to ask.
            since: the first round that may include a contribution of ours.

        Raises UnreachableError if `peer` does not answer, PeerFault if its answer is malformed.
        """
        own = self._chain.head
        shown = await self._reader.read(peer, own.round)
        if not _continues(own, shown):
            common = min(own.round, shown.head.round)
            shown = await self._reader.read(peer, max(0, min(since, common - MAX_KEPT_COMMITS)))
        state = self._checked_state(shown, peer)
        offer = self._to_offer(shown)
        word = await ask_for_word(self._reader, self._chain, offer, self._contacts, self._swarm_view.stage_witnesses)
        return SyncOffer(offer, state, shown.revisions, word)

    def _to_offer(self, shown: ShownChain) -> ChainOffer:
        state = shown.state.digest if shown.state is not None and self._has_shared_state else b""
        return ChainOffer(shown.log, shown.head, state)

    def _checked_state(self, shown: ShownChain, peer: PeerId) -> Blob | None:
        state = shown.state
        if state is not None and state.size != self._state_bytes:
            raise MalformedError(f"{peer} has a state of {state.size} bytes instead of {self._state_bytes}")
        return state


async def ask_for_word(
    reader: ChainReader,
    own: Chain,
    offer: ChainOffer,
    contacts: Sequence[PeerId],
    witnesses: Callable[[], Sequence[PeerId]],
) -> bool | None:
    """Return the word of the contacts about a chain; if none of them knows it, that of the peers of its stage.

    None if nobody knows it, or nobody is asked, because we know voters that could certify it.
    """
    common = [head for head in offer.heads if own.has_head(head.digest)]
    if common and own.electorate_at(common[-1].digest).voters:
        return None
    word = await ask_contacts(reader, contacts, offer)
    if word is None and (others := witnesses()):
        return await ask_contacts(reader, others, offer)
    return word


async def ask_contacts(reader: ChainReader, contacts: Sequence[PeerId], offer: ChainOffer) -> bool | None:
    """Return whether most of the contacts that answer are on a chain, and name no other state; None if none answers."""
    asked = contacts[:MAX_ASKED_CONTACTS]
    words = await asyncio.gather(*(_ask_contact(reader, contact, offer) for contact in asked))
    answered = [word for word in words if word is not None]
    return 2 * sum(answered) > len(answered) if answered else None


async def _ask_contact(reader: ChainReader, contact: PeerId, offer: ChainOffer) -> bool | None:
    try:
        shown = await reader.read(contact, max(0, offer.head.round - WORD_ROUNDS))
        theirs = ChainOffer(shown.log, shown.head, shown.state.digest if shown.state is not None else b"")
    except (UnreachableError, PeerFault):
        return None
    if theirs.head.round == 0:
        return None
    if _agree(theirs, offer):
        return not offer.state or theirs.state_at(offer.head) in (offer.state, b"")
    return _agree(offer, theirs)


def _continues(own: ChainHead, shown: ShownChain) -> bool:
    """Return whether a chain continues ours by so few commits that nothing else of it is needed."""
    commits = shown.log.commits
    if shown.head.digest == own.digest:
        return True
    return bool(commits) and commits[0].body.base == own.digest and len(commits) <= RETAINED_ROUNDS


def _agree(longer: ChainOffer, shorter: ChainOffer) -> bool:
    return any(head.digest == shorter.head.digest for head in longer.heads)


def _parse_head(reply: ChainReply) -> ChainHead:
    check_digest(reply.digest)
    if reply.round > MAX_ROUND or reply.chain_tokens > MAX_CHAIN_TOKENS:
        raise MalformedError(f"a head of round {reply.round} with {reply.chain_tokens} tokens is out of range")
    if reply.revision:
        check_digest(reply.revision)
    return ChainHead(reply.round, reply.digest, reply.chain_tokens, reply.revision)
