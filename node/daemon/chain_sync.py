"""Plan how a peer that is behind, new, or on the losing chain catches up with the swarm.

The client asks a peer that is ahead for the commits after its own round. If they continue its chain, it replays them:
same blobs, same arithmetic, same digests. Otherwise it downloads the state itself, from all peers that have it.
"""

from collections.abc import Iterable, Sequence

from node.daemon.peer_rpc import ChannelTo, request_chain
from node.loop.catch_up import SyncPlan, is_worth_taking, plan_replay
from protocol.admission.electorate import OPEN, Electorate
from protocol.blobs.blob import Blob, check_digest
from protocol.consensus.chain import Chain, ChainHead, extend_head
from protocol.consensus.message_kinds import parse
from protocol.consensus.messages import Commit, ContributionLimits, SignedMessage
from protocol.errors import MalformedError, StaleError
from protocol.identity import PeerId
from protocol.manifest import AdmissionSection, RunId
from protocol.murmur_pb2 import ChainReply
from protocol.signing import MAX_CHAIN_TOKENS, MAX_ROUND
from protocol.steering.revision_log import SignedRevision, open_revision
from protocol.steering.revisions import MAX_REVISIONS

MAX_COMMITS = 64


class ChainReader:
    """Requests chains from the peers of a run."""

    def __init__(
        self, run_id: RunId, limits: ContributionLimits, channel: ChannelTo, rule: AdmissionSection = OPEN
    ) -> None:
        self._run_id = run_id
        self._rule = rule
        self._limits = limits
        self._channel = channel

    async def read(self, peer: PeerId, after_round: int) -> tuple[ChainReply, tuple[SignedMessage[Commit], ...]]:
        """Return a peer's reply, and the commits in it: those after `after_round` that fit in one reply.

        Raises UnreachableError if the peer does not answer, PeerFault if it sends anything but commits.
        """
        reply = await request_chain(self._run_id, self._channel, peer, after_round)
        return reply, _parse_commits(reply, self._run_id, self._limits)

    async def read_electorate(
        self, peer: PeerId, head: ChainHead, reply: ChainReply, commits: Sequence[SignedMessage[Commit]]
    ) -> Electorate:
        """Return the voters after `head` on the chain of a peer, from its reply or from another one.

        Raises UnreachableError or PeerFault, also if the peer does not know these voters.
        """
        electorate = Electorate.from_bytes(reply.electorate, self._rule)
        for commit in commits:
            if commit.body.round == electorate.round < head.round:
                electorate = electorate.after(commit.body)
        if electorate.round != head.round:
            reply = await request_chain(self._run_id, self._channel, peer, head.round)
            electorate = Electorate.from_bytes(reply.electorate, self._rule)
        if electorate.round != head.round:
            raise StaleError(f"{peer} does not show the voters after round {head.round}")
        return electorate

    def open_revisions(self, reply: ChainReply) -> tuple[SignedRevision, ...]:
        """Return the checked revisions in a reply. Raises PeerFault."""
        if len(reply.revisions) > MAX_REVISIONS:
            raise MalformedError(f"{len(reply.revisions)} revisions in one reply; at most {MAX_REVISIONS}")
        return tuple(open_revision(signed, self._run_id, self._limits.organiser) for signed in reply.revisions)


def heads_along(start: ChainHead, commits: Iterable[Commit]) -> list[ChainHead]:
    """Return the head after each commit. Raises MalformedError unless the commits continue `start`."""
    heads, head = [], start
    for commit in commits:
        try:
            head = extend_head(head, commit)
        except StaleError as fault:
            raise MalformedError(f"the commits do not follow one another: {fault}") from fault
        heads.append(head)
    return heads


def find_reached_head(commits: Sequence[SignedMessage[Commit]]) -> ChainHead:
    """Return the head after the last commit, with the tokens of these commits; MalformedError as above."""
    bodies = [commit.body for commit in commits]
    return heads_along(ChainHead(bodies[0].round, bodies[0].base, 0), bodies)[-1]


class ChainSyncClient:
    """Requests the path to another peer's head; `state_bytes` is the size of every state of this run."""

    def __init__(self, reader: ChainReader, chain: Chain, state_bytes: int) -> None:
        self._reader = reader
        self._chain = chain
        self._state_bytes = state_bytes

    async def plan_sync(self, peer: PeerId, replay: bool, history_since: int) -> SyncPlan:
        """Return the plan to the head of `peer`: by replay of commits if possible, else by a state download.

        Args:
            peer: the peer to ask.
            replay: whether to replay commits that continue our chain.
            history_since: the first round that may include a contribution of ours. The other chain may include it in a
                round that ended differently on ours, so for a state the client also requests the commits from there on.

        Raises UnreachableError if `peer` does not answer, PeerFault if its answer is malformed.
        """
        mine = self._chain.head
        reply, commits = await self._reader.read(peer, mine.round)
        head = _parse_head(reply)
        replayed = plan_replay(self._chain, commits) if replay else None
        if replayed is not None:
            return replayed
        if not is_worth_taking(mine, head):
            raise StaleError(f"{peer} is at round {head.round}, which is not ahead of ours")
        if history_since < mine.round:
            longer, earlier = await self._reader.read(peer, history_since)
            if earlier:
                reply, head, commits = longer, _parse_head(longer), earlier
        revisions = self._reader.open_revisions(reply)
        linked, state = _require_linked(commits, head), self._state(reply, peer)
        electorate = await self._reader.read_electorate(peer, head, reply, linked)
        return SyncPlan(head, linked, state, revisions, electorate)

    def _state(self, reply: ChainReply, peer: PeerId) -> Blob:
        state = Blob.from_wire(reply.state)
        if state.size != self._state_bytes:
            raise MalformedError(f"{peer} has a state of {state.size} bytes instead of {self._state_bytes}")
        return state


def _require_linked(commits: tuple[SignedMessage[Commit], ...], head: ChainHead) -> tuple[SignedMessage[Commit], ...]:
    """Return consecutive commits that lead to `head` or end before it. Raises MalformedError for others."""
    if not commits:
        return commits
    reached = find_reached_head(commits)
    if reached.round > head.round or (reached.round == head.round and reached.digest != head.digest):
        raise MalformedError(f"the commits do not lead to the head of round {head.round}")
    return commits


def _parse_head(reply: ChainReply) -> ChainHead:
    check_digest(reply.digest)
    if reply.round > MAX_ROUND or reply.chain_tokens > MAX_CHAIN_TOKENS:
        raise MalformedError(f"a head of round {reply.round} with {reply.chain_tokens} tokens is out of range")
    if reply.revision:
        check_digest(reply.revision)
    return ChainHead(reply.round, reply.digest, reply.chain_tokens, reply.revision)


def _parse_commits(reply: ChainReply, run_id: RunId, limits: ContributionLimits) -> tuple[SignedMessage[Commit], ...]:
    if len(reply.commits) > MAX_COMMITS:
        raise MalformedError(f"{len(reply.commits)} commits in one reply; at most {MAX_COMMITS}")
    messages = [parse(signed, run_id, limits) for signed in reply.commits]
    if not all(isinstance(message.body, Commit) for message in messages):
        raise MalformedError("the chain has messages that are not commits")
    return tuple(messages)  # type: ignore[arg-type]  # checked one line above
