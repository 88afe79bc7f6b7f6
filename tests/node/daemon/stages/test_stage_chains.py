"""Another stage's chain counts by its certificates: for standing, and for what it decided of a step."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from node.daemon.peers.chain_sync import ShownChain
from node.daemon.stages import stage_chains
from node.daemon.stages.stage_chains import FollowedStage, StageChains
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead
from protocol.consensus.messages.contributions import Commit
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.exact import StepDecisions
from protocol.pipeline.ledger import StepLedger
from protocol.pipeline.stage import StageManifest
from tests.node.small_run import MANIFEST, PEERS, admitted_of, certified, contribution_of, stated

MODEL = MANIFEST.model.model_copy(update={"layers": 2, "tied": False})
TABLE = MANIFEST.pipeline.model_copy(update={"stages": 2, "microbatch": 1})
CUT = MANIFEST.model_copy(update={"model": MODEL, "pipeline": TABLE})
STAGE = StageManifest.of(CUT, 1)
COUNT = 4
NAMES = [peer.peer_id for peer in PEERS]
LIAR = NAMES[3]


class Directory:
    peer_id = "me"

    def __init__(self) -> None:
        self.records: dict[PeerId, PeerRecord] = {}
        self.refused: list[tuple[PeerId, str]] = []

    def record_refusal(self, peer: PeerId, fault: PeerFault) -> None:
        self.refused.append((peer, fault.metric_label))

    def live(self) -> dict[PeerId, PeerRecord]:
        return self.records

    def subscribe(self, listener: object) -> None:
        pass


def commit_to(chain: Chain, ledgers: Mapping[int, tuple[int, ...]], signers: tuple[int, ...] = ()) -> CertifiedCommit:
    """Return a certified commit after the head of a chain; `ledgers`: the microbatches of each contributor."""
    bodies = {
        peer: replace(
            contribution_of(chain.head, [Blob.of(bytes([peer]))]), ledger=StepLedger.of(COUNT, ids).to_bytes()
        )
        for peer, ids in ledgers.items()
    }
    statements = sorted((stated(PEERS[peer], body) for peer, body in bodies.items()), key=lambda each: each.sender)
    commit = Commit(chain.round, 0, chain.digest, tuple(statements), ())
    return certified(chain, stated(PEERS[min(ledgers)], commit), signers=signers)


class World:
    """A node of stage 0, and the chains that peers of stage 1 show."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.admitted = admitted_of(self.directory, CUT, stages=2)
        self.decisions = StepDecisions(2, COUNT)
        self.chains = StageChains(CUT, self.admitted, cast(Any, None), (), self.decisions, random.Random(0))
        self.followed = FollowedStage(STAGE, cast(Any, None))
        self.followed.reader = cast(Any, self)
        self.chain = Chain.from_genesis(STAGE.run_id)
        self.decided: CertifiedCommit | None = None
        self.shown: dict[PeerId, ShownChain] = {}
        self.asked: list[PeerId] = []

    def announce(self, *peers: PeerId, **fields: int) -> None:
        for peer in peers:
            self.directory.records[peer] = PeerRecord(role="trainer", stage=2, stage_life=1, **fields)  # type: ignore[arg-type]

    async def read(self, peer: PeerId, after: int) -> ShownChain:
        self.asked.append(peer)
        log = self.chain.log_since(min(after, self.chain.round)) or self.chain.log
        return self.shown.get(peer) or ShownChain(self.chain.head, log, None, (), self.decided)

    async def look(self) -> bool:
        return await self.chains._look(self.followed)

    @property
    def decided_rounds(self) -> dict[int, dict[int, bool]]:
        return {number: dict(stages) for number, stages in self.decisions.reports().decided.items()}


@pytest.fixture
async def world() -> World:
    world = World()
    world.announce(*NAMES[:2])
    return world


COMPLETE = {0: (0, 1), 1: (2, 3)}


async def test_decision_counts_before_the_stage_has_applied_it(world: World) -> None:
    world.decided = commit_to(world.chain, COMPLETE)
    assert not await world.look() and not world.asked, "nobody announces anything"
    world.announce(NAMES[0], step_decided=2)
    assert await world.look() and world.decided_rounds == {0: {1: True}}
    world.chain.append(world.decided)
    world.decided = commit_to(world.chain, {0: (0, 1), 1: (1, 2)})
    world.announce(NAMES[1], round=1, step_decided=3)
    assert await world.look() and world.decided_rounds == {0: {1: True}, 1: {1: False}}
    world.announce("key")
    assert world.admitted.standing_records().keys() == set(NAMES[:2]), "and the contributors have standing"


async def test_record_without_a_certificate_decides_nothing(world: World) -> None:
    """One record that voids every round was enough before."""
    world.chain.append(commit_to(world.chain, COMPLETE))
    world.announce(NAMES[0], round=1)
    assert await world.look()
    forged = commit_to(world.chain, {3: (0,)}, signers=(3,))
    world.shown[LIAR] = ShownChain(world.chain.head, world.chain.log, None, (), forged)
    world.announce(LIAR, step_decided=3)
    assert not await world.look() and world.asked[-1] == LIAR
    assert world.decided_rounds == {0: {1: True}} and world.followed.chain.round == 1
    assert not await world.look() and world.asked.count(LIAR) == 1, "it is not asked again for a while"


async def test_record_of_rounds_that_its_maker_never_shows_is_counted_against_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_chains, "AVOID_SECONDS", 0.0)
    world.announce(LIAR, round=5)
    assert not await world.look() and not world.directory.refused, "it may have been early"
    assert not await world.look() and world.directory.refused == [(LIAR, "stale")]
    world.chain.append(commit_to(world.chain, COMPLETE))
    assert await world.look(), "it shows one"
    assert not await world.look() and len(world.directory.refused) == 1


async def test_peers_with_standing_are_asked_before_keys_that_announce_more(world: World) -> None:
    world.chain.append(commit_to(world.chain, COMPLETE))
    world.announce(NAMES[0], round=1)
    assert await world.look()
    world.chain.append(commit_to(world.chain, COMPLETE))
    for number in range(100):
        world.announce(f"key {number}", round=4000)
    world.announce(NAMES[1], round=2)
    assert await world.look() and world.asked[-1] == NAMES[1] and world.followed.chain.round == 2


async def test_peer_of_another_stage_shows_the_commits_that_it_used(world: World) -> None:
    """The peers of a stage may all die after they have decided a round."""
    world.chain.append(commit_to(world.chain, COMPLETE))
    world.directory.records[NAMES[2]] = PeerRecord(role="trainer", stage=1, stage_life=1, round=1)
    assert await world.look() and world.asked == [NAMES[2]] and world.decided_rounds == {0: {1: True}}


async def test_chain_far_ahead_is_taken_by_the_word_of_its_peers(world: World) -> None:
    for _ in range(70):
        world.chain.append(commit_to(world.chain, COMPLETE))
    world.announce(*NAMES[:2], round=70)
    for peer in NAMES[:2]:
        world.directory.records[peer].digest = world.chain.digest
    assert await world.look() and world.followed.chain.head == world.chain.head
    assert len(world.decided_rounds) == 64
    false = ChainHead(99, bytes(32), 10**9)
    world.shown[LIAR] = ShownChain(false, world.chain.log, None, ())
    world.announce(LIAR, round=99)
    assert not await world.look() and world.followed.chain.round == 70
