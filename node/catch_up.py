"""Brings a peer that is behind, new, or on the lesser of two chains to where the swarm is.

It asks a peer that is ahead for the commits after its own round. Where they continue its chain they are replayed:
the same blobs, the same arithmetic, the same digests. Otherwise the state itself is fetched, from all who hold it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from protocol.blobs import Blob
from protocol.chain import Chain, Head, preferred
from protocol.errors import MalformedError, PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import ChainReply, ChainRequest, PeerRecord
from protocol.murmur_pb2_grpc import RoundsStub
from protocol.statements import Commit, Statement, Terms, parse

logger = logging.getLogger(__name__)

CALL_SECONDS = 10.0
Channels = Callable[[PeerId], grpc.aio.Channel]
MAX_COMMITS = 64


@dataclass(frozen=True)
class Way:
    """How to get from our head to another: by these commits, or by taking over a state."""

    head: Head
    commits: tuple[Statement[Commit], ...]  # they continue our chain when `state` is None
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


class Scout:
    """Asks others for the way. `state_bytes`: the size that every state of this run has."""

    def __init__(self, run_id: RunId, terms: Terms, chain: Chain, channel: Channels, state_bytes: int) -> None:
        self._run_id, self._terms, self._chain = run_id, terms, chain
        self._channel, self._state_bytes = channel, state_bytes

    async def find_way(self, peer: PeerId, replay: bool) -> Way:
        """With `replay` by commits, if they continue our chain; otherwise by taking over the state.

        Raises UnreachableError when `peer` does not answer, PeerFault when its answer is no good.
        """
        request = ChainRequest(run=bytes.fromhex(self._run_id), after_round=self._chain.round)
        try:
            reply: ChainReply = await RoundsStub(self._channel(peer)).Chain(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise UnreachableError(f"{peer} does not tell its chain: {error.details()}") from error
        commits = _commits(reply, self._run_id, self._terms)
        if replay and commits and continues(self._chain, commits):
            return Way(self._chain.would_lead_to(commits), commits, None)
        state = Blob.from_wire(reply.state)
        if state.size != self._state_bytes:
            raise MalformedError(f"{peer} offers a state of {state.size} bytes, {self._state_bytes} are expected")
        return Way(Head(reply.round, reply.digest, reply.chain_tokens), commits, state)


def continues(chain: Chain, commits: tuple[Statement[Commit], ...]) -> bool:
    try:
        chain.would_lead_to(commits)
    except PeerFault:
        return False
    return True


def _commits(reply: ChainReply, run_id: RunId, terms: Terms) -> tuple[Statement[Commit], ...]:
    if len(reply.commits) > MAX_COMMITS:
        raise MalformedError(f"{len(reply.commits)} commits at once")
    statements = [parse(signed, run_id, terms) for signed in reply.commits]
    if not all(isinstance(statement.body, Commit) for statement in statements):
        raise MalformedError("a chain of something else than commits")
    return tuple(statements)  # type: ignore[arg-type]  # checked one line above
