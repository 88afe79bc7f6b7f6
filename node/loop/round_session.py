"""Run the round machine of the open round, and handle messages of the rounds before and after it. PURE.

The session buffers early messages until their round opens, and answers late ones with the decision of their round.
Actions that follow a vote wait until that vote is on disk.

A peer that left a chain may come back to one of its earlier heads. Its statements in the round after that head still
bind it, because two for one place are a proof of guilt. So its votes and contributions are remembered by the head that
they continue.
"""

from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from node.loop.actions import CloseRound, FetchBlob, LoopAction, PrecomputeCommit, ReducePart, SendReply
from node.loop.contributions import StoredContribution
from node.loop.events import BlobMissing
from node.loop.options import RoundOptions
from protocol.audits import seal_contribution
from protocol.blobs.blob import Blob
from protocol.conduct import RoundConduct
from protocol.consensus.chain import CertifiedCommit, Chain
from protocol.consensus.events import (
    Action,
    ContributionFaulty,
    Event,
    Fetch,
    Finish,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    MisbehaviourSeen,
    Reduce,
    Rejected,
    RequestEarlySubmit,
    Send,
    Speculate,
    Tick,
    VoteRecord,
)
from protocol.consensus.machine import RoundMachine, Signer
from protocol.consensus.messages.buffer import MessageBuffer, MessageKey, message_key
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.kinds import ReducedPart, named_blobs
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.pacing import Pacing, Patience
from protocol.consensus.settings import RoundStart
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.recent import RecentTable
from protocol.steering import Revision

MAX_STATEMENTS = 64  # heads that a peer may come back to: as many commits are kept
MAX_PENDING_ACTIONS = 4096  # waiting for a vote; further messages are dropped, because peers retransmit


class RoundSession:
    """Drives the round machines of one replica, one after another; sets `decided` when a round ends with a commit.

    Args:
        options: the options of all rounds.
        signer: signs our messages.
        pacing: decides how many steps to make and when to submit early.
        last_vote: the last vote of this peer, of any round.
        known_voters: peers that count as alive when the first round opens, in addition to the live ones.
    """

    def __init__(
        self, options: RoundOptions, signer: Signer, pacing: Pacing, last_vote: VoteRecord | None,
        known_voters: Collection[PeerId] = (),
    ) -> None:  # fmt: skip
        self._options = options
        self._signer = signer
        self.pacing = pacing
        self._patience = Patience()
        self._votes = RecentTable[Digest, VoteRecord](MAX_STATEMENTS)  # the last one by the base of its round
        if last_vote is not None:
            self._votes[last_vote.base] = last_vote
        self._contributed = RecentTable[Digest, Contribution](MAX_STATEMENTS)  # by the base of its round
        self._known_voters = frozenset(known_voters) | (last_vote.members if last_vote else frozenset())
        self._machine: RoundMachine | None = None
        self._number = -1
        self._opening = 0
        self._membership: MembershipChanged | None = None
        self._last_seen: Mapping[PeerId, float] | None = None
        self._buffer = MessageBuffer(options.settings(0).leader_timeout)
        self._messages: dict[MessageKey, SignedMessage[Any]] = {}  # of the open round
        self._owner_messages: dict[Blob, Signed] = {}  # the one in which an owner names a blob
        self._events: list[Event] = []  # for the machine
        self._pending: deque[Action] = deque()
        self._is_persisting = False
        self._actions: list[LoopAction] = []
        self.decided: CertifiedCommit | None = None
        self.conduct: RoundConduct | None = None  # the conduct of the others in the last round, as we saw it
        self.left_out: frozenset[Digest] = frozenset()  # blobs of the last round that peers may request in the next

    @property
    def signer(self) -> Signer:
        return self._signer

    @property
    def machine(self) -> RoundMachine | None:
        return self._machine

    @property
    def number(self) -> int:
        """Return the number of the open round, or of the last one."""
        return self._number

    @property
    def is_open(self) -> bool:
        return self._machine is not None

    @property
    def is_persisting(self) -> bool:
        """Return whether a vote is being written."""
        return self._is_persisting

    @property
    def pending_actions(self) -> Iterable[Action]:
        """Return the actions that wait until a vote is on disk."""
        return self._pending

    def has_member(self, peer: PeerId) -> bool:
        return self._machine is not None and self._machine.has_member(peer)

    def recently_seen(self, now: float) -> frozenset[PeerId]:
        """Return the peers that still count in a majority: alive, or vanished a moment ago."""
        times = self._machine.last_seen if self._machine is not None else self._last_seen or {}
        since = now - self._options.settings(max(0, self._number)).vote_memory
        return frozenset(peer for peer, seen in times.items() if seen >= since)

    def open(
        self, chain: Chain, state: Digest, membership: MembershipChanged, trainers: Iterable[PeerId],
        revisions: tuple[SignedMessage[Revision], ...], now: float,
    ) -> None:  # fmt: skip
        """Open the round after the head of a chain.

        Args:
            chain: the chain that the round continues, with the keys that may vote.
            state: the digest of our outer state; empty where peers share none.
            membership: the peers that take part.
            trainers: every live trainer of the run, at any round.
            revisions: those that a commit of ours adopts.
            now: the current time.
        """
        head, last_seen = chain.head, self._last_seen
        if last_seen is None:
            last_seen = dict.fromkeys([*self._known_voters, *trainers], now)
        self._number = head.round
        self._opening += 1
        settings = self._options.settings(head.round)
        self._machine = RoundMachine(
            settings,
            self._options.peer_id,
            RoundStart(
                head.round,
                head.digest,
                last_seen,
                self._votes.get(head.digest),
                head.revision,
                revisions,
                self._options.audit_secret,
                chain.electorate,
                state,
                head.tokens,
                # Less than a leader's timeout: peers that know of no newcomer do not suspect the leader.
                self._patience.for_round(min(settings.grace, settings.leader_timeout / 2), now),
            ),
            self._signer,
            now,
            self.pacing.early_submit_policy,
        )
        self.pacing.grace = settings.grace
        self.pacing.open_round(head.round, now)
        self._membership = None
        self.update_membership(membership)
        for message in self._buffer.open_round(head.round):
            self._receive(message)

    def close(self) -> None:
        """Abandon the open round."""
        self._end()
        self._buffer.clear()

    def update_membership(self, membership: MembershipChanged) -> None:
        """Pass on a membership that differs from the last; most record renewals change nothing."""
        if self.is_open and membership != self._membership:
            self._membership = membership
            self._events.append(membership)

    def submit(
        self, contribution: StoredContribution, chain: Chain, now: float, stored: Container[Blob] | None = None
    ) -> None:
        """Submit our own contribution, whose blobs are in the store, to the open round.

        If we have been in this round before and left it, others may have the contribution that we made then. It is
        submitted again, or none if its blobs are gone.

        Args:
            contribution: our pending one.
            chain: the chain that the round continues.
            now: the current time.
            stored: the blobs of ours that are in the store; None if all are.
        """
        head, has_vote = chain.head, self._options.peer_id in chain.electorate.voters
        header = contribution.header
        self.pacing.record_submit(header.steps if header.round == head.round else None, now)
        body = contribution.to_contribution(head, self._options.limits)
        body = replace(body, ticket=None if has_vote else self._options.ticket)
        if self._options.limits.audited:
            body = seal_contribution(body, chain, self._options.peer_id, self._signer)
        body = self._contributed.setdefault(head.digest, body)
        if stored is None or all(blob in stored for blob in body.parts):
            self._events.append(LocalContribution(body))

    def receive(
        self, sender: PeerId, messages: Iterable[SignedMessage[Any]], trainers: Collection[PeerId], now: float
    ) -> None:
        """Handle messages that `sender` delivered; buffer early ones only if a live trainer signed them."""
        late: set[int] = set()
        for message in messages:
            if self._buffer.is_late(message):
                late.add(message.body.round)
            elif message.body.round == self._number + 1 and message.sender in trainers:
                self._buffer.buffer_early(message)
            elif message.body.round != self._number and not self._buffer.has_decision(message.body.round):
                self._actions.append(Rejected(message.sender, "wrong round"))
            self._receive(message)
        if late:
            # Only the oldest round: the sender must apply it before it can use the others.
            answer = self._buffer.answer_late(min(late), sender, now)
            self._actions += [SendReply(sender, answer)] if answer else []

    def accuse(self, seen: MisbehaviourSeen) -> None:
        """Let the open round know of a false statement about it."""
        if self.is_open and seen.round == self._number:
            self._events.append(seen)

    def drop_contributions(self, failed: BlobMissing) -> bool:
        """Let the open round know whose contributions are unusable; return whether the fetch was for that round."""
        if not self.is_open or failed.opening != self._opening:
            return False
        self._events += [ContributionFaulty(peer, failed.reason) for peer in failed.owners]
        return True

    def _receive(self, message: SignedMessage[Any]) -> None:
        if self._machine is None or message.body.round != self._number:
            return
        if self._machine.has_member(message.sender):
            key = message_key(message)
            if key not in self._messages:
                self._index_blobs(message)
            self._messages[key] = message
        self._events.append(MessageReceived(message))

    def _index_blobs(self, message: SignedMessage[Any]) -> None:
        """Index the blobs of the first message of each kind: a peer cannot fill the table by naming ever new ones."""
        match message.body:
            case Contribution(parts=blobs):
                self._owner_messages.update(dict.fromkeys(blobs, message.signed))
            case ReducedPart(blob=blob):
                self._owner_messages[blob] = message.signed

    def feed(self, event: Event, opening: int | None = None) -> None:
        """Queue an event for the machine, unless it answers an action of an earlier opening."""
        if self.is_open and opening in (None, self._opening):
            self._events.append(event)

    def tick(self) -> None:
        self.feed(Tick())

    def vote_persisted(self) -> None:
        self._is_persisting = False

    def next_deadline(self, now: float) -> float | None:
        return self._machine.next_deadline(now) if self._machine is not None else None

    def advance(self, now: float) -> list[LoopAction]:
        """Give all queued events to the machine together; return the resulting actions."""
        events, self._events = self._events, []
        machine = self._machine
        if machine is not None and events:
            for action in machine.handle_all(events, now):
                if len(self._pending) >= MAX_PENDING_ACTIONS and isinstance(action, Send):
                    self._actions.append(Rejected(None, "slow disk"))
                else:
                    self._pending.append(action)
        while self._pending and not self._is_persisting:
            self._release(self._pending.popleft(), now)
        actions, self._actions = self._actions, []
        return actions

    def _release(self, action: Action, now: float) -> None:
        match action:
            case VoteRecord():
                self._persist(action)
            case Speculate(commit):
                self._precompute(commit)
            case Fetch():
                self._actions.append(self._fetch(action))
            case Reduce():
                self._actions.append(ReducePart(self._opening, self._number, action))
            case Finish(commit):
                self._finish(commit, now)
            case RequestEarlySubmit():
                self.pacing.record_early_request(now)
                self._actions.append(action)
            case Send() | Rejected():
                self._actions.append(action)

    def _persist(self, vote: VoteRecord) -> None:
        self._votes[vote.base] = vote
        self._is_persisting = True
        self._actions.append(vote)
        if vote.lock:
            self._precompute(vote.lock.body)

    def _precompute(self, commit: Commit) -> None:
        self._actions.append(PrecomputeCommit(commit, self.contributions_for(commit)))

    def describe_pace(self, round_number: int) -> str:
        """Describe how many of the planned steps this peer makes; empty if it makes all."""
        return self.pacing.describe(round_number)

    def contributions_for(self, commit: Commit) -> tuple[SignedMessage[Contribution], ...]:
        """Return the contributions of a commit that this peer applies."""
        return self._options.settings(commit.round).topology.contributions_for(commit, self._options.peer_id)

    def _finish(self, commit: SignedMessage[Commit], now: float) -> None:
        assert self._machine is not None
        self.pacing.close_round(self._machine.arrival_times, commit.body.roster_peers)
        self._patience.spend(self._machine.patience_spent)
        self.left_out, self.conduct = self._machine.left_out_blobs, self._machine.conduct
        informed = self._machine.last_seen if commit.sender == self._options.peer_id else ()
        self._buffer.record_decision(self._number, self._machine.signed_decision, informed, now)
        decided = self._machine.decided
        self._end()
        self.decided = decided

    def _end(self) -> None:
        if self._machine is None:
            return
        self._last_seen = self._machine.last_seen
        self._machine = None
        self._events.clear()
        self._pending.clear()
        self._messages.clear()
        self._owner_messages.clear()
        self._actions.append(CloseRound())

    def _fetch(self, order: Fetch) -> FetchBlob:
        return FetchBlob(
            opening=self._opening,
            round=self._number,
            part_blob=order.part_blob,
            sources=order.sources,
            priority=self._priority_of(order),
            seconds=self._options.settings(self._number).exchange_timeout,
            owner_message=self._owner_message(order.part_blob.blob),
            owners=order.owners,
        )

    def _priority_of(self, order: Fetch) -> int:
        """Return the priority of a download: parts that we reduce first, then sums of others, then parts that we check.

        Peers can then compute and fetch a sum while the contributions to the next part are still in transit. The sums
        of others follow our own parts cyclically, so that not all peers ask the same reducer first.
        """
        part, most = order.part_blob.part, self._options.limits.parts
        own = self._machine.parts_to_reduce if self._machine else ()
        if not order.is_reduced:
            return part if part in own or not own else 2 * most + part
        parts = self._options.settings(self._number).topology.parts
        return most + (part - min(own, default=0)) % parts

    def _owner_message(self, blob: Blob) -> Signed | None:
        """Return the message in which its owner names a blob, directly or quoted by another peer."""
        if blob in self._owner_messages:
            return self._owner_messages[blob]
        named = (entry for message in self._messages.values() for entry in named_blobs(message))
        owners = (entry.message for entry in named if entry.blob == blob)
        return next((owner.signed for owner in owners if isinstance(owner.body, Contribution | ReducedPart)), None)
