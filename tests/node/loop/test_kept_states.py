"""A newcomer of a stage whose peers have all gone takes the state that a peer of another stage keeps."""

import random
from typing import Any, cast

from node.daemon.peers.swarm_view import SwarmView
from node.daemon.stages.stage_record import StageRecords
from node.loop.actions import FindPath, LoopAction, StartTrainer, TakeState
from node.loop.events import PathFound, Started, SwarmChanged
from protocol.admission import AdmissionPolicy
from protocol.manifest.sections import AdmissionSection
from protocol.membership.record_fields import KeptState, encode_kept_states
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.stage import StageManifest
from tests.certificates import offer_of
from tests.node.daemon.peers.test_swarm_view import FakeDirectory, FakeStatus
from tests.node.loop.loop_under_test import FRIEND, ME, OTHER, STATE, LoopUnderTest, chain_of, of_kind
from tests.node.small_run import MANIFEST, admitted_of

STAGE = 1
CUT = MANIFEST.model_copy(update={"pipeline": MANIFEST.pipeline.model_copy(update={"stages": 3, "microbatch": 1})})
CUT_STAGE = StageManifest.of(CUT, STAGE)
CHAIN = chain_of(3)[0]


def view_of(*kept: KeptState) -> SwarmView:
    """Return how a trainer of the stage sees a trainer of another one, which keeps these states."""
    directory = FakeDirectory()
    directory.peer_id = ME
    other = PeerRecord(role="trainer", stage=1, round=3, digest=bytes(32), kept=encode_kept_states(kept))
    directory.records = {ME: PeerRecord(role="trainer", stage=STAGE + 1), FRIEND: other}
    return SwarmView(
        admitted_of(directory, stages=3),
        FakeStatus(),
        True,
        random.Random(0),
        StageRecords(cast(Any, directory)).record_of(CUT_STAGE),
    )


def kept_at(stage: int) -> KeptState:
    return KeptState(stage, CHAIN.round, CHAIN.digest, CHAIN.head.tokens, STATE.digest)


def join(view: SwarmView) -> tuple[LoopUnderTest, list[LoopAction]]:
    peer = LoopUnderTest(has_contacts=True)
    return peer, peer.post(SwarmChanged(view.snapshot()), Started())


def test_newcomer_of_an_empty_stage_takes_the_kept_state() -> None:
    view = view_of(kept_at(STAGE))
    peer, actions = join(view)
    assert of_kind(FindPath, actions)[0].peer == FRIEND and not of_kind(StartTrainer, actions)
    assert view.stage_witnesses() == [FRIEND] and view.trainers() == [ME] and view.live_peers([FRIEND]) == [FRIEND]
    taken = of_kind(TakeState, peer.post(PathFound(offer_of(CHAIN, STATE, word=True))))
    assert [(action.state, action.holders) for action in taken] == [(STATE, (FRIEND,))]


def test_without_a_keeper_of_the_stage_it_begins_at_the_initial_weights() -> None:
    """Control of the one above; a state of another stage is of no use."""
    for view in (view_of(), view_of(kept_at(0)), view_of(kept_at(2))):
        actions = join(view)[1]
        assert of_kind(StartTrainer, actions) and not of_kind(FindPath, actions) and not view.stage_witnesses()


def test_kept_state_that_most_of_its_keepers_deny_is_not_taken() -> None:
    for word in (None, False):
        peer, _ = join(view_of(kept_at(STAGE)))
        assert not of_kind(TakeState, peer.post(PathFound(offer_of(CHAIN, STATE, word=word))))


def test_keepers_that_the_run_admits_have_the_word() -> None:
    """Control: a host has no ticket, and has the word where nobody else keeps the stage."""
    view = view_of(kept_at(STAGE))
    view._admitted_peers.gate = AdmissionPolicy(
        MANIFEST.model_copy(update={"admission": AdmissionSection(mode="list", keys=(OTHER,))})
    )
    assert view.stage_witnesses() == [FRIEND]
    cast(Any, view._directory).records[OTHER] = view._directory.live()[FRIEND]
    assert view.stage_witnesses() == [OTHER]


def test_record_of_a_peer_of_the_stage_is_not_overridden_by_what_it_keeps() -> None:
    view = view_of(kept_at(STAGE))
    view._directory.live()[FRIEND].stage = STAGE + 1
    assert view.snapshot().peers[FRIEND].head != CHAIN.head and view.snapshot().peers[FRIEND].is_trainer
