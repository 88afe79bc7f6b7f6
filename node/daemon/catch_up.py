"""Brings a peer that is behind, new, or on the lesser of two chains to where the swarm is.

It asks a peer that is ahead for the commits after its own round. Where they continue its chain they are replayed:
the same blobs, the same arithmetic, the same digests. Otherwise the state itself is fetched, from all who hold it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from node.daemon.calls import Channels, ask_chain
from protocol.blobs.blob import Blob, check_digest
from protocol.errors import MalformedError, PeerFault, StaleError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import ChainReply, PeerRecord
from protocol.records import MAX_CHAIN_TOKENS, MAX_ROUND
from protocol.rounds.chain import Chain, Head, preferred
from protocol.rounds.kinds import parse
from protocol.rounds.statements import Commit, Statement, Terms

MAX_COMMITS = 64
PATIENCE = 1.5  # seconds that the next commit may take to come by itself before we ask for it
GAP = 2  # rounds behind, from which on we ask at once


@dataclass(frozen=True)
class Way:
    """How to get from our head to another: by these commits, or by taking over a state.

    `commits` follow one another. When `state` is None they continue our chain; otherwise they lead to `head`, or are
    the first of more, and tell what became of our message.
    """

    head: Head
    commits: tuple[Statement[Commit], ...]
    state: Blob | None


def ahead(mine: Head, records: Mapping[PeerId, PeerRecord]) -> dict[Head, list[PeerId]]:
    """Who stands on a head that is to be preferred to ours, by head."""
    found: dict[Head, list[PeerId]] = {}
    for peer, record in records.items():
        if len(record.digest) == len(mine.digest):
            head = Head(record.round, record.digest, record.chain_tokens)
            if head.digest != mine.digest and preferred(mine, head):
                found.setdefault(head, []).append(peer)
    return found


def best(heads: Mapping[Head, list[PeerId]]) -> tuple[Head, list[PeerId]]:
    head = max(heads, key=lambda candidate: (candidate.tokens, candidate.digest))
    return head, heads[head]


def is_time_to_go(mine: Head, theirs: Head, waited: float) -> bool:
    """Whether to go to a head that is to be preferred, known of for `waited` seconds: what may be the commit of the
    round we are in comes by itself. A head that is not above ours is on another chain, and comes to us never."""
    return not 0 < theirs.round - mine.round < GAP or waited >= PATIENCE


class Scout:
    """Asks others for the way. `state_bytes`: the size that every state of this run has."""

    def __init__(self, run_id: RunId, terms: Terms, chain: Chain, channel: Channels, state_bytes: int) -> None:
        self._run_id = run_id
        self._terms = terms
        self._chain = chain
        self._channel = channel
        self._state_bytes = state_bytes

    async def find_way(self, peer: PeerId, replay: bool, since: int) -> Way:
        """With `replay` by commits, if they continue our chain; otherwise by taking over the state.

        `since`: the first round that our message was offered to. The other chain may have taken it in a round that we
        know otherwise, so of a state its commits are asked for from there on.

        Raises UnreachableError when `peer` does not answer, PeerFault when its answer is no good.
        """
        mine = self._chain.head
        reply = await ask_chain(self._run_id, self._channel, peer, mine.round)
        head, commits = _head(reply), _commits(reply, self._run_id, self._terms)
        if replay and commits and continues(self._chain, commits):
            return Way(self._chain.would_lead_to(commits), commits, None)
        if head.digest != mine.digest and not preferred(mine, head):
            raise StaleError(f"{peer} stands at round {head.round}, from which nothing is to be had")
        if since < mine.round:
            longer = await ask_chain(self._run_id, self._channel, peer, since)
            if longer.commits:
                reply, head = longer, _head(longer)
                commits = _commits(longer, self._run_id, self._terms)
        return Way(head, _linked(commits, head), self._state(reply, peer))

    def _state(self, reply: ChainReply, peer: PeerId) -> Blob:
        state = Blob.from_wire(reply.state)
        if state.size != self._state_bytes:
            raise MalformedError(f"{peer} offers a state of {state.size} bytes, {self._state_bytes} are expected")
        return state


def continues(chain: Chain, commits: tuple[Statement[Commit], ...]) -> bool:
    try:
        chain.would_lead_to(commits)
    except PeerFault:
        return False
    return True


def _linked(commits: tuple[Statement[Commit], ...], head: Head) -> tuple[Statement[Commit], ...]:
    """MalformedError unless they follow one another, not beyond `head`, and lead to it where they reach so far."""
    if not commits:
        return commits
    chain = Chain(Head(commits[0].body.round, commits[0].body.base, 0))
    try:
        reached = chain.would_lead_to(commits)
    except StaleError as fault:
        raise MalformedError(f"commits that do not follow one another: {fault}") from fault
    if reached.round > head.round or (reached.round == head.round and reached.digest != head.digest):
        raise MalformedError(f"commits that do not lead to the head of round {head.round}")
    return commits


def _head(reply: ChainReply) -> Head:
    check_digest(reply.digest)
    if reply.round > MAX_ROUND or reply.chain_tokens > MAX_CHAIN_TOKENS:
        raise MalformedError(f"a head of round {reply.round} with {reply.chain_tokens} tokens is out of range")
    return Head(reply.round, reply.digest, reply.chain_tokens)


def _commits(reply: ChainReply, run_id: RunId, terms: Terms) -> tuple[Statement[Commit], ...]:
    if len(reply.commits) > MAX_COMMITS:
        raise MalformedError(f"{len(reply.commits)} commits at once")
    statements = [parse(signed, run_id, terms) for signed in reply.commits]
    if not all(isinstance(statement.body, Commit) for statement in statements):
        raise MalformedError("a chain of something else than commits")
    return tuple(statements)  # type: ignore[arg-type]  # checked one line above
