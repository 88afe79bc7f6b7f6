"""A run of a thousand parameters: its method, its peers, and signed statements of them, for tests of the daemon."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.state.outer_state import OuterState, ReplicatedState, RoundCompute, state_bytes
from node.model import shape_table
from optim.compose import compose
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.admission import AdmissionPolicy
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead
from protocol.consensus.messages.contributions import Commit, Contribution, ContributionLimits
from protocol.consensus.messages.kinds import kind_of
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.errors import DeniedError, GoneError, MalformedError, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import Signed
from protocol.signing import sign
from protocol.steering import REFERENCE_MANIFEST
from tests.certificates import certify

torch.set_num_threads(1)
TOML = """
[run]
name = "small"
min_peers = {min_peers}
[model]
vocabulary = 16
width = 8
layers = 1
heads = 2
hidden = 16
context = 8
[data]
source = "text"
path = "*.txt"
[train]
batch_tokens = 8
learning_rate = 1e-2
[method]
recipe = "diloco"
[membership]
heartbeat = 0.2
expiry = 0.8
[target]
{target}
"""


def admitted_of(directory: object, manifest: Manifest = REFERENCE_MANIFEST, stages: int = 1) -> AdmittedPeers:
    """Return the peers of a directory, or of one that stands in, which the rule of a manifest admits."""
    return AdmittedPeers(cast(Any, directory), AdmissionPolicy(manifest), stages)


def manifest_of(target: str = "", min_peers: int = 1) -> Manifest:
    return parse_manifest(TOML.format(target=target, min_peers=min_peers).encode(), "test")


MANIFEST = manifest_of()
RUN_ID = MANIFEST.run_id
SHAPES = shape_table(MANIFEST.model)
NUMEL = SHAPES.numel
PEERS = [Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(1, 7)]


def method_of(topology: str = "gather") -> Method:
    return compose("diloco", {"codec": {"kind": "none"}, "topology": {"kind": topology}})


def program_of(method: Method, parts: int = 1) -> RoundPlanner:
    return RoundPlanner(method, SHAPES.layout, parts)


METHOD = method_of()
PROGRAM = program_of(METHOD)
STATE_BYTES = state_bytes(NUMEL, METHOD)


def terms_of(parts: int = 1) -> ContributionLimits:
    return ContributionLimits("diloco", SHAPES.hash(), parts, 1 << 40, METHOD.codec.max_bytes(NUMEL))


TERMS = terms_of()


def payload(seed: int, numel: int = NUMEL) -> bytes:
    return bytes(METHOD.codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(seed))))


def contribution_of(head: ChainHead, parts: Sequence[Blob]) -> Contribution:
    return Contribution(head.round, head.digest, "diloco", SHAPES.hash(), 100, 5, 3.0, tuple(parts))


def stated(identity: Identity, body: Any, run_id: str = RUN_ID) -> SignedMessage[Any]:
    return SignedMessage.of(sign(identity, kind_of(body), run_id, body.to_wire()), body)


def commit_of(head: ChainHead, messages: Mapping[int, Blob | tuple[Blob, ...]]) -> SignedMessage[Commit]:
    """Return the commit of the round after `head`, led by its first contributor. `messages`: by number of the peer."""
    parts = {peer: (named,) if isinstance(named, Blob) else named for peer, named in messages.items()}
    statements = [stated(PEERS[peer], contribution_of(head, named)) for peer, named in parts.items()]
    ordered = tuple(sorted(statements, key=lambda statement: statement.sender))
    return stated(PEERS[next(iter(messages), 0)], Commit(head.round, 0, head.digest, ordered, ()))


def certified(
    chain: Chain, commit: SignedMessage[Commit], state: Digest = b"", signers: Collection[int] = ()
) -> CertifiedCommit:
    """Return a commit that continues a chain, acknowledged by these peers, or by all voters and its contributors."""
    named = {PEERS[number].peer_id for number in signers} or {*chain.electorate.voters, *commit.body.by_sender}
    return certify(commit, chain, RUN_ID, [peer for peer in PEERS if peer.peer_id in named], state)


def store_in(folder: Path) -> BlobStore:
    return BlobStore(folder, 1 << 26, 1 << 26)


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """In the place of the worker thread."""
    await asyncio.sleep(0)
    return function(*arguments)


def replica_in(store: BlobStore) -> ReplicatedState:
    workshop = RoundCompute(PROGRAM, store, lambda *_: 1.0)
    anchor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    return ReplicatedState(Chain.from_genesis(RUN_ID), OuterState.initial(anchor, METHOD), workshop, at_once, at_once)


def states_computed_by(replica: ReplicatedState, monkeypatch: pytest.MonkeyPatch) -> list[OuterState]:
    """One for each time that a commit is applied; it grows."""
    apply, computed = replica._compute.apply_commit, list[OuterState]()

    def noted(*arguments: Any) -> OuterState:
        computed.append(apply(*arguments))
        return computed[-1]

    monkeypatch.setattr(replica._compute, "apply_commit", noted)
    return computed


async def apply(replica: ReplicatedState, commit: SignedMessage[Commit] | CertifiedCommit) -> CertifiedCommit:
    signed = commit.commit if isinstance(commit, CertifiedCommit) else commit
    entry = certified(replica.chain, signed, replica.blob.digest)
    await replica.advance(entry, await replica.compute_next(entry, commit.body.contributions))
    return entry


async def grown(replica: ReplicatedState, store: BlobStore, rounds: int, peer: int = 1) -> list[CertifiedCommit]:
    """Let it go through rounds of one contribution; the commits."""
    commits = []
    for _ in range(rounds):
        blob = store.put(payload(replica.chain.round + 1000 * peer))
        commits.append(await apply(replica, commit_of(replica.chain.head, {peer: blob})))
    return commits


class CopyingFetcher:
    """In the place of protocol.blobs.download.Fetcher: copies from the named peers' stores into memory, waits while
    none has it."""

    def __init__(self, store: BlobStore, stores: dict[PeerId, BlobStore]) -> None:
        self.store = store
        self.stores = stores
        self.asked: list[Blob] = []
        self.turns: dict[Blob, int] = {}
        self.under_way = 0

    async def fetch(
        self,
        blob: Blob,
        sources: Callable[[], Sequence[PeerId]],
        deadline: float,
        priority: int = 0,
        *,
        wait_if_absent: bool = True,
        owners: Sequence[PeerId] = (),
    ) -> None:
        self.asked.append(blob)
        self.turns[blob] = priority
        self.under_way += 1
        try:
            async with asyncio.timeout(deadline):
                while not self.store.has(blob.digest):
                    holders = [peer for peer in sources() if peer in self.stores]
                    found = [peer for peer in holders if self.stores[peer].has(blob.digest)]
                    if found:
                        self.store.put_in_memory(self.stores[found[0]].read(blob.digest))
                    elif not wait_if_absent:
                        raise GoneError("nobody has it any more")
                    elif present := [peer for peer in owners if peer in holders]:
                        raise DeniedError("it names what it lacks", present[0])
                    await asyncio.sleep(0.005)
                if self.store.blob(blob.digest) != blob:
                    raise MalformedError("a blob of that digest has another size")
        except TimeoutError as error:
            raise UnreachableError(f"nobody has {blob.name[:8]}") from error
        finally:
            self.under_way -= 1


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def kinds(envelopes: Iterable[Signed]) -> list[str]:
    return [signed.kind for signed in envelopes]
