"""Strangers with free keys announce a state of their own: no command fetches it, and no host keeps it."""

import ast
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import node
from node.daemon.peers.chain_sync import ShownChain
from node.daemon.stored_states import state_store
from node.daemon.stored_states.choice import StateOffer
from node.daemon.stored_states.state_store import StateStore
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.fork_choice import ChainOffer
from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.manifest.reading import parse_manifest
from protocol.murmur_pb2 import PeerRecord
from protocol.signing import TrustPoint
from tests.node.daemon.stored_states.test_state_store import TEXT, KeptRun, keep
from tests.node.small_run import PEERS, certified, commit_of

pytestmark = pytest.mark.slow
HONEST = tuple(peer.peer_id for peer in PEERS[1:4])
STRANGERS = tuple(peer.peer_id for peer in PEERS[4:6])


class ChainsByPeer:
    """Shows each peer's own chain, and the state at its head; a peer without one does not answer."""

    def __init__(self) -> None:
        self.chains: dict[PeerId, tuple[Chain, bytes]] = {}

    async def read(self, peer: PeerId, after: int) -> ShownChain:
        if peer not in self.chains:
            raise UnreachableError(f"{peer} does not answer")
        chain, state = self.chains[peer]
        log = chain.log_since(min(after, chain.round)) or chain.log
        return ShownChain(chain.head, log, Blob.of(state), ())


class AttackedRun(KeptRun):
    """Three honest trainers with a chain and a state, and whatever strangers announce besides."""

    def __init__(self, folder: Path, text: str = TEXT) -> None:
        super().__init__(folder, parse_manifest(text.encode(), "test"))
        self.sockets = tempfile.TemporaryDirectory(prefix="mm", dir="/tmp", ignore_cleanup_errors=True)
        self.pool.folder = Path(self.sockets.name)  # names of sockets have at most 107 bytes
        self.reader = ChainsByPeer()
        sources = self.store._sources
        object.__setattr__(sources, "reader", self.reader)
        object.__setattr__(sources, "contacts", HONEST[:1])
        self.states: list[bytes] = []

    async def stop(self) -> None:
        await self.pool.stop()
        self.sockets.cleanup()

    def extend(self, chain: Chain, numbers: Sequence[int], state: bytes, signers: Sequence[int] = ()) -> None:
        """Append a commit of these peers; its certificate names the state before."""
        commit = commit_of(chain.head, {number: Blob.of(bytes([chain.round, number])) for number in numbers})
        chain.append(certified(chain, commit, Blob.of(state).digest, signers))

    async def train(self, rounds: int) -> bytes:
        """Let the honest make rounds, and show and serve their newest state; return it."""
        for _ in range(rounds):
            self.states.append(self.new_state(len(self.states)))
            self.extend(self.chain, (1, 2, 3), self.states[-2] if len(self.states) > 1 else b"")
        await self.join(HONEST, self.chain, self.states[-1])
        return self.states[-1]

    def new_state(self, seed: float) -> bytes:
        numel = self.store.folder.state_bytes // 4
        return bytes(torch.full((numel,), 0.001 * (1 + seed)).numpy().data.cast("B"))

    async def join(
        self, peers: Sequence[PeerId], chain: Chain | None, state: bytes, head: ChainHead | None = None
    ) -> None:
        """Let peers announce a state at the head of a chain, or at another one, and serve both."""
        head = head or (chain.head if chain is not None else None)
        assert head is not None
        for peer in peers:
            self.directory.records[peer] = PeerRecord(
                role="trainer", round=head.round, digest=head.digest, chain_tokens=head.tokens,
                state_digest=Blob.of(state).digest,
            )  # fmt: skip
            if chain is not None:
                self.reader.chains[peer] = chain, state
            await self.pool.add_honest(peer, state)


FOREIGN = 250.0  # of the strangers: all weights are about a quarter


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AttackedRun]:
    monkeypatch.setattr(state_store, "CONFIRM_SECONDS", 0.6)
    attacked = AttackedRun(tmp_path)
    await attacked.train(3)
    yield attacked
    await attacked.stop()


async def invent(run: AttackedRun, rounds: int = 5) -> bytes:
    """Let the two strangers show a whole chain of their own, with more tokens; return their state."""
    chain, state = Chain.from_genesis(run.manifest.run_id), run.new_state(FOREIGN)
    for _ in range(rounds):
        run.extend(chain, (4, 5), state)
    await run.join(STRANGERS, chain, state)
    return state


async def believe(store: StateStore, offer: StateOffer) -> ChainOffer:
    """Prove nothing, as before: the head is the one that the records name."""
    return cast(ChainOffer, SimpleNamespace(head=offer.head))


async def test_model_of_strangers_is_not_fetched(run: AttackedRun) -> None:
    await invent(run)
    fetched = await run.store.fetch_newest(5.0)
    assert fetched.head == run.chain.head and fetched.blob == Blob.of(run.states[-1])


async def test_control_without_proof_the_model_of_strangers_is_fetched(
    run: AttackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = await invent(run)
    monkeypatch.setattr(StateStore, "_prove", believe)
    assert (await run.store.fetch_newest(5.0)).blob == Blob.of(foreign)


async def test_head_without_a_chain_gives_way_to_the_one_before(run: AttackedRun) -> None:
    await run.join(STRANGERS, None, run.new_state(FOREIGN), ChainHead(4000, b"\x07" * 32, 1 << 50))
    fetched = await run.store.fetch_newest(5.0)
    assert fetched.head == run.chain.head and fetched.blob == Blob.of(run.states[-1])


async def test_commit_that_only_strangers_acknowledged_gives_way_to_the_one_before(run: AttackedRun) -> None:
    longer = Chain.from_genesis(run.manifest.run_id)
    longer.switch_to(run.chain.head, run.chain.log)
    run.extend(longer, (4, 5), run.states[-1], signers=(4, 5))
    await run.join(STRANGERS, longer, run.new_state(FOREIGN))
    assert (await run.store.fetch_newest(5.0)).blob == Blob.of(run.states[-1])


async def test_many_keys_that_name_a_false_state_of_the_true_head_are_outvoted(run: AttackedRun) -> None:
    crowd = [f"stranger-{number}" for number in range(20)]
    await run.join(crowd, run.chain, run.new_state(FOREIGN))
    fetched = await run.store.fetch_newest(8.0)
    assert fetched.head == run.chain.head and fetched.blob == Blob.of(run.states[-1])


async def test_state_that_the_next_certificate_contradicts_is_refused_at_once(run: AttackedRun) -> None:
    before = run.chain.head
    await run.train(1)
    object.__setattr__(run.store._sources, "contacts", ())  # which would name the true state too
    state = run.new_state(FOREIGN)
    offer = StateOffer(before, Blob.of(state).digest, HONEST)
    with pytest.raises(state_store.UncertifiedError, match="names another state"):
        await run.store._prove(offer)
    true = StateOffer(before, Blob.of(run.states[-2]).digest, HONEST)
    assert (await run.store._prove(true)).head == before


async def test_many_invented_heads_do_not_delay_a_fetch_for_long(run: AttackedRun) -> None:
    for number in range(40):
        head, pair = ChainHead(4000 + number, bytes([number]) * 32, 1 << 50), (f"x{number}", f"y{number}")
        await run.join(pair, None, run.new_state(FOREIGN), head)
    assert (await run.store.fetch_newest(5.0)).blob == Blob.of(run.states[-1])


async def test_trust_point_of_the_organiser_decides_without_a_contact(run: AttackedRun) -> None:
    state = Blob.of(run.states[-1]).digest
    point = TrustPoint.of(run.chain.round, run.chain.digest, state, run.chain.electorate.digest)
    object.__setattr__(run.store._sources, "contacts", ())
    object.__setattr__(run.store._sources, "trust", point)
    await invent(run)
    for number in range(20):  # more keys than the honest have
        run.directory.records[f"x{number}"] = run.directory.records[STRANGERS[0]]
    assert (await run.store.fetch_newest(5.0)).head == run.chain.head


async def test_keys_that_the_run_does_not_admit_are_no_witnesses(tmp_path: Path) -> None:
    keys = ", ".join(f'"{key}"' for key in HONEST)
    run = AttackedRun(tmp_path, TEXT + f'[admission]\nmode = "list"\nkeys = [{keys}]\n')
    run.chain = Chain.from_genesis(run.manifest.run_id, run.manifest.admission)
    await run.train(2)
    await run.join(STRANGERS, None, run.new_state(FOREIGN), ChainHead(4000, b"\x07" * 32, 1 << 50))
    offer = run.store._choose()
    assert offer is not None and offer.head == run.chain.head
    await run.stop()


async def test_host_keeps_the_true_state_while_strangers_announce_another(run: AttackedRun) -> None:
    await invent(run)
    await keep(run.store, run.chain.head)
    assert run.store.blob == Blob.of(run.states[-1])


def test_nothing_fetches_a_state_without_proof() -> None:
    """`StateStore._fetch_both` alone calls the raw download, and nothing in a command has a downloader of its own."""
    root = Path(node.__file__).parent
    callers: list[tuple[str, str]] = []
    for path in [
        *root.glob("daemon/stored_states/*.py"),
        *root.glob("commands/**/*.py"),
        *root.glob("dashboard/**/*.py"),
    ]:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef):
                callers += [(path.name, function.name) for call in ast.walk(function) if is_raw_fetch(call)]
    contributions = ("replay.py", "_obtain")  # the blobs that certified commits name
    assert sorted(set(callers)) == [contributions, ("state_store.py", "_fetch"), ("state_store.py", "_fetch_both")]


def is_raw_fetch(call: Any) -> bool:
    """Return whether a node calls `self._fetch(...)` or the `fetch` of a downloader."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return False
    return call.func.attr == "_fetch" or (call.func.attr == "fetch" and "downloader" in ast.unparse(call.func.value))
