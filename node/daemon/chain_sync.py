"""Brings a peer that is behind, new, or on the lesser of two chains to where the swarm is.

It asks a peer that is ahead for the commits after its own round. Where they continue its chain they are replayed:
the same blobs, the same arithmetic, the same digests. Otherwise the state itself is fetched, from all who hold it.
"""

from collections.abc import Iterable

from node.daemon.peer_rpc import ChannelTo, request_chain
from node.loop.catch_up import SyncPlan, is_worth_taking, plan_replay
from protocol.blobs.blob import Blob, check_digest
from protocol.consensus.chain import Chain, ChainHead, extend_head
from protocol.consensus.message_kinds import parse
from protocol.consensus.messages import Commit, ContributionLimits, SignedMessage
from protocol.errors import MalformedError, StaleError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import ChainReply
from protocol.signing import MAX_CHAIN_TOKENS, MAX_ROUND

MAX_COMMITS = 64


class ChainReader:
    """Asks peers of a run for their chains."""

    def __init__(self, run_id: RunId, limits: ContributionLimits, channel: ChannelTo) -> None:
        self._run_id = run_id
        self._limits = limits
        self._channel = channel

    async def read(self, peer: PeerId, after_round: int) -> tuple[ChainReply, tuple[SignedMessage[Commit], ...]]:
        """Return what a peer answers, and the commits in it: those after that round, as far as one answer goes.

        Raises UnreachableError when the peer does not answer, PeerFault when it sends something else than commits.
        """
        reply = await request_chain(self._run_id, self._channel, peer, after_round)
        return reply, _parse_commits(reply, self._run_id, self._limits)


def heads_along(start: ChainHead, commits: Iterable[Commit]) -> list[ChainHead]:
    """Return the head after each commit. Raises MalformedError unless they follow one another from `start` on."""
    heads, head = [], start
    for commit in commits:
        try:
            head = extend_head(head, commit)
        except StaleError as fault:
            raise MalformedError(f"commits that do not follow one another: {fault}") from fault
        heads.append(head)
    return heads


class ChainSyncClient:
    """Asks others for the path to their head. `state_bytes`: the size that every state of this run has."""

    def __init__(self, reader: ChainReader, chain: Chain, state_bytes: int) -> None:
        self._reader = reader
        self._chain = chain
        self._state_bytes = state_bytes

    async def plan_sync(self, peer: PeerId, replay: bool, history_since: int) -> SyncPlan:
        """With `replay` by commits, if they continue our chain; otherwise by taking over the state.

        `since`: the first round that our message was offered to. The other chain may have taken it in a round that we
        know otherwise, so of a state its commits are asked for from there on.

        Raises UnreachableError when `peer` does not answer, PeerFault when its answer is no good.
        """
        mine = self._chain.head
        reply, commits = await self._reader.read(peer, mine.round)
        head = _parse_head(reply)
        replayed = plan_replay(self._chain, commits) if replay else None
        if replayed is not None:
            return replayed
        if not is_worth_taking(mine, head):
            raise StaleError(f"{peer} stands at round {head.round}, from which nothing is to be had")
        if history_since < mine.round:
            longer, earlier = await self._reader.read(peer, history_since)
            if earlier:
                reply, head, commits = longer, _parse_head(longer), earlier
        return SyncPlan(head, _require_linked(commits, head), self._state(reply, peer))

    def _state(self, reply: ChainReply, peer: PeerId) -> Blob:
        state = Blob.from_wire(reply.state)
        if state.size != self._state_bytes:
            raise MalformedError(f"{peer} offers a state of {state.size} bytes, {self._state_bytes} are expected")
        return state


def _require_linked(commits: tuple[SignedMessage[Commit], ...], head: ChainHead) -> tuple[SignedMessage[Commit], ...]:
    """MalformedError unless they follow one another, not beyond `head`, and lead to it where they reach so far."""
    if not commits:
        return commits
    bodies = [commit.body for commit in commits]
    reached = heads_along(ChainHead(bodies[0].round, bodies[0].base, 0), bodies)[-1]
    if reached.round > head.round or (reached.round == head.round and reached.digest != head.digest):
        raise MalformedError(f"commits that do not lead to the head of round {head.round}")
    return commits


def _parse_head(reply: ChainReply) -> ChainHead:
    check_digest(reply.digest)
    if reply.round > MAX_ROUND or reply.chain_tokens > MAX_CHAIN_TOKENS:
        raise MalformedError(f"a head of round {reply.round} with {reply.chain_tokens} tokens is out of range")
    return ChainHead(reply.round, reply.digest, reply.chain_tokens)


def _parse_commits(reply: ChainReply, run_id: RunId, limits: ContributionLimits) -> tuple[SignedMessage[Commit], ...]:
    if len(reply.commits) > MAX_COMMITS:
        raise MalformedError(f"{len(reply.commits)} commits at once")
    statements = [parse(signed, run_id, limits) for signed in reply.commits]
    if not all(isinstance(statement.body, Commit) for statement in statements):
        raise MalformedError("a chain of something else than commits")
    return tuple(statements)  # type: ignore[arg-type]  # checked one line above
