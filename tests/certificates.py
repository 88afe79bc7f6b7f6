"""Certificates for commits of test chains, signed by the identities of `tests.node.small_run`."""

from collections.abc import Collection

from node.loop.peers.catch_up import SyncOffer
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain
from protocol.consensus.fork_choice import ChainOffer
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.kinds import Acknowledgement, Basis, CommitCertificate, kind_of
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.identity import Identity
from protocol.signing import sign


def certify(
    commit: SignedMessage[Commit], chain: Chain, run_id: str, signers: Collection[Identity], state: Digest = b""
) -> CertifiedCommit:
    """Return a commit that continues a chain, with a certificate of these signers."""
    basis = Basis(state, chain.electorate.digest, chain.tokens)
    body = Acknowledgement(commit.body.round, commit.body.view, commit.digest, basis)
    votes = [
        SignedMessage.of(sign(signer, kind_of(body), run_id, body.to_wire()), body)
        for signer in sorted(signers, key=lambda signer: signer.peer_id)
    ]
    return CertifiedCommit(commit, CommitCertificate.of(votes))


def offer_of(chain: Chain, state: Blob | None = None, word: bool | None = None) -> SyncOffer:
    """Return the answer of a peer that shows this chain."""
    return SyncOffer(ChainOffer(chain.log, chain.head, state.digest if state else b""), state, (), word)
