"""What liars make: noise in the right format, contributions and commits, and the services that serve them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from node.daemon.state.outer_state import state_bytes
from node.from_manifest import build_program
from node.model import shape_table
from optim.exchange import ContributionEncoder
from protocol.blobs.blob import Blob
from protocol.blobs.server import BlobService, register_blob_service
from protocol.blobs.store import BlobStore
from protocol.consensus.chain import CertifiedCommit, ChainHead, ChainLog, extend_head
from protocol.consensus.messages.contributions import Commit, Contribution, Evidence
from protocol.consensus.messages.kinds import Acknowledgement, Basis, Body, CommitCertificate, ReducedPart, kind_of
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.identity import Identity
from protocol.murmur_pb2 import ChainReply, ChainRequest, DeliverReply, DeliverRequest
from protocol.murmur_pb2_grpc import RoundsServicer, add_RoundsServicer_to_server
from protocol.signing import sign
from protocol.transport.transport import caller
from tests.hostile.attackers.stranger import Stranger

STORE_BYTES = 1 << 30
FLEET = 6  # keys that certify what we invent
NOISE = 0.5  # of a value of an invented update; an honest one has about 0.003
HONEST_TOKENS = 1280  # of a contribution of the small run: five steps
BodyT = TypeVar("BodyT", bound=Body)


class FalseChain(RoundsServicer):
    """Answers every question for the chain with what `reply` returns, and takes all messages."""

    def __init__(self, reply: Callable[[int], ChainReply]) -> None:
        self.reply = reply

    async def Deliver(self, request: DeliverRequest, context: Any) -> DeliverReply:  # noqa: N802
        return DeliverReply()

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        return self.reply(request.after_round)


class Forger:
    """Makes and serves forged data in the name of one stranger; create it before the stranger opens."""

    def __init__(self, stranger: Stranger) -> None:
        self.stranger = stranger
        self.planner = build_program(stranger.manifest)
        self.store = BlobStore(stranger.home / "blobs", STORE_BYTES, STORE_BYTES)
        self.chain = FalseChain(lambda _: ChainReply())
        self._fleet = [Identity.create() for _ in range(FLEET)]
        self._random = np.random.default_rng(int.from_bytes(stranger.peer_id.encode()[-8:]))
        stranger.services += [
            partial(register_blob_service, BlobService(self.store, caller)),
            partial(add_RoundsServicer_to_server, self.chain),
        ]

    @property
    def state_bytes(self) -> int:
        return state_bytes(self.planner.numel, self.planner.method)

    def noise_state(self) -> Blob:
        """Return a state of the right size whose values are all random."""
        noise = self._random.standard_normal(self.state_bytes // 4, dtype=np.float32)
        return self.store.put_in_memory(noise.tobytes())

    def noise_payloads(self, round_number: int, scale: float) -> list[Blob]:
        """Return the parts of a random message, with values of about `scale`."""
        numel = self.planner.signal_numel
        noise = torch.from_numpy(self._random.standard_normal(numel, dtype=np.float32) * np.float32(scale))
        payloads = ContributionEncoder(self.planner).encode(round_number, noise, torch.zeros(numel))
        return [self.store.put_in_memory(bytes(payload)) for payload in payloads]

    def contribution(
        self, number: int, base: Digest, parts: Sequence[Blob], tokens: int = HONEST_TOKENS
    ) -> Contribution:
        shapes = shape_table(self.stranger.manifest.model).hash()
        codec = self.stranger.manifest.method.recipe
        return Contribution(number, base, codec, shapes, tokens, 5, 1.0, tuple(parts))

    def invent_rounds(self, log: ChainLog, head: ChainHead, state: Digest, count: int) -> tuple[ChainLog, ChainHead]:
        """Continue a chain by commits of our own, certified by a fleet of our keys.

        Args:
            log: the chain.
            head: its head.
            state: the digest of the outer state at the head.
            count: the number of commits.
        """
        for _ in range(count):
            parts = self.noise_payloads(head.round, NOISE)
            own = self.sign(self.contribution(head.round, head.digest, parts, 2 * HONEST_TOKENS))
            commit = self.sign(self._with_evidence(Commit(head.round, 0, head.digest, (own,), tuple(parts))))
            basis = Basis(state, log.electorates[-1].digest, head.tokens)
            entry = CertifiedCommit(commit, self._certify(commit, basis))
            log, head = ChainLog(log.electorate, (*log.commits, entry)), extend_head(head, commit.body)
        return log, head

    def _with_evidence(self, commit: Commit) -> Commit:
        """Return the commit with our own signatures as the reducers of all its parts."""
        roster = bytes(32)
        announced = [
            self.sign(ReducedPart(commit.round, 0, roster, 0, part, blob, commit.inputs))
            for part, blob in enumerate(commit.parts)
        ]
        reducers = (self.stranger.peer_id,) * len(announced)
        signatures = tuple(message.signed.signature for message in announced)
        return replace(commit, evidence=Evidence(0, roster, 0, reducers, signatures))

    def _certify(self, commit: SignedMessage[Commit], basis: Basis) -> CommitCertificate:
        vote = Acknowledgement(commit.body.round, commit.body.view, commit.digest, basis)
        voters = sorted([self.stranger.identity, *self._fleet], key=lambda identity: identity.peer_id)
        return CommitCertificate.of([self.sign(vote, identity) for identity in voters])

    def sign(self, body: BodyT, identity: Identity | None = None) -> SignedMessage[BodyT]:
        envelope = sign(identity or self.stranger.identity, kind_of(body), self.stranger.run_id, body.to_wire())
        return SignedMessage.of(envelope, body)
