"""A daemon and the trainers of its exact stage: what a dead trainer was told harms no microbatch of the next one."""

import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from node.daemon.inbox import Inbox
from node.daemon.stages.activations import ActivationFetcher, ActivationStore, slot_sizes
from node.daemon.stages.calls import StageCalls
from node.daemon.stages.stage_effects import NodeStages, StageEffects
from node.data import BatchReader, Corpus
from node.data.corpus import TokenArray
from node.loop.stage_loop import StageLoop
from node.loop.stage_modes import ExactMode
from node.model import build_model, cut_of
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import AnchorApplied, Ready
from node.trainer.ipc.stage_messages import ComputeStage, DrawMicrobatch, MicrobatchDrawn, StageCommand
from node.trainer.stages.stage_work import StageWork
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.manifest.sections import PipelineSection
from protocol.membership.peer_table import FieldValue
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.exact import StepAgreement
from protocol.pipeline.messages import Key
from protocol.pipeline.microbatch import OwnerSettings
from protocol.pipeline.owner import Owner
from protocol.pipeline.stage import StageManifest, StageSettings
from tests.node.small_run import MANIFEST, admitted_of

ME, COUNT, IN_FLIGHT = "me", 4, 2
RUNS = ("aa" * 32, "bb" * 32)
MODEL = MANIFEST.model.model_copy(update={"layers": 2, "tied": False})
TABLE = PipelineSection.model_validate(
    {"stages": 2, "mode": "exact", "microbatch": 2, "activations": "fp32", "in_flight": IN_FLIGHT}
)
TRAIN = MANIFEST.train.model_copy(update={"batch_tokens": COUNT * 2 * MODEL.context})
STAGE = StageManifest.of(MANIFEST.model_copy(update={"model": MODEL, "pipeline": TABLE, "train": TRAIN}), 0)


class Directory:
    """Lists this peer alone, as its record says."""

    peer_id, start = ME, 1 << 63

    def __init__(self) -> None:
        self.record = PeerRecord(role="trainer")

    def live(self) -> dict[str, PeerRecord]:
        return {ME: self.record}

    def publish(self, *, urgent: bool = False, **fields: FieldValue) -> None:
        for name, value in fields.items():
            setattr(self.record, name, value)

    update = publish


class Background:
    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()


class World:
    """The daemon's part of one stage; its trainer is given its commands by hand."""

    def __init__(self, folder: Path) -> None:
        sizes = slot_sizes(STAGE)
        self.memory = ActivationMemory.create(sizes)
        self.activations = ActivationStore(self.memory, BlobStore(folder, sizes.total_bytes, sizes.total_bytes))
        node, inbox = NodeStages(admitted_of(Directory(), stages=2), StageCalls(cast(Any, None))), Inbox()
        fetcher = ActivationFetcher(node.directory, node.blobs, cast(Any, None), self.activations, ("", ""))
        settings = StageSettings(RUNS[0], 0, 2, sizes.activation_bytes, sizes.token_bytes, COUNT, TABLE.memory)
        owner = Owner(OwnerSettings(ME, IN_FLIGHT), RUNS, random.Random(0))
        self.agreement = StepAgreement(ME, RUNS, 0, COUNT)
        self.loop = StageLoop(settings, owner, ExactMode(self.agreement, 0, TABLE.microbatch), 1 << 20)
        record = node.records.record_of(STAGE)
        self.stage = StageEffects(self.loop, node, record, fetcher, Identity.create(), cast(Any, Background()), inbox)
        node.add(RUNS[0], self.stage)
        inbox.attach_stage(self.stage.handle)

    def take_commands(self) -> list[StageCommand]:
        queue = self.stage._commands
        return [queue.get_nowait() for _ in range(queue.qsize())]

    def ready(self, start: int, round_number: int = 0, exact_step: int = 0) -> list[StageCommand]:
        """Let a trainer be ready; return the commands to it."""
        ready = Ready(device="cpu", step=0, round=round_number, outstanding=None, exact_step=exact_step, start=start)
        self.stage.on_trainer_message(ready)
        return self.take_commands()

    def trainer(self, start: int) -> StageWork:
        row = np.random.default_rng(0).integers(0, 16, 5000, dtype=np.uint8)
        corpus = Corpus.of(TokenArray([row]), TokenArray([row[:100]]), 16)
        work = StageWork(
            STAGE, build_model(MODEL, cut=cut_of(STAGE)), self.memory, BatchReader(corpus, MODEL.context, 0, "exact")
        )
        work.start = start
        return work


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "control"])
async def test_commands_to_a_dead_trainer_change_no_slot_of_the_next_one(world: World, is_checked: bool) -> None:
    """They are in the channel that the next trainer finds when it starts, before its Ready is heard."""
    stale = [each for each in world.ready(start=0) if isinstance(each, DrawMicrobatch)]
    assert len(stale) == IN_FLIGHT
    world.stage.set_resting(True)  # others have counted these microbatches meanwhile
    assert not world.ready(start=1)
    # The slots are free again, and microbatches of another peer come into them.
    fetched = bytes(len(world.memory.slot(stale[0].slot)))
    for serial in range(IN_FLIGHT):
        content = bytes([serial]) + fetched[1:]
        world.activations.copy(Key("other", serial), Blob.of(content), content)
    new = world.trainer(start=1 if is_checked else 0)
    for command in stale:
        new.serve(command)
    held = [Blob.of(world.memory.slot(slot)).digest for slot in world.activations._slots.values()]
    assert (held == list(world.activations._slots)) == is_checked, "the bytes of a blob have changed"


async def test_gradient_that_a_dead_trainer_was_to_add_is_not_added_by_the_next_one(world: World) -> None:
    tokens = world.memory.sizes.activations
    command = ComputeStage(task=1, is_backward=True, adds=True, tokens=tokens, gradient=0, number=3, start=0)
    for start in (1, 0):  # the control is the trainer that it was for
        work = world.trainer(start)
        assert work.exact is not None
        assert (work.serve(command) is None) == (start == 1)
        assert list(work.exact.ledger) == ([] if start == 1 else [3])


async def test_sum_takes_no_microbatch_twice(world: World) -> None:
    exact = world.trainer(start=0).exact
    assert exact is not None
    gradient = exact._total.float()
    exact.add(3, gradient, 1.0)
    with pytest.raises(MalformedError):
        exact.add(3, gradient, 1.0)
    exact.take_away(3, gradient)
    with pytest.raises(MalformedError):
        exact.take_away(3, gradient)


async def test_trainer_that_died_after_it_applied_an_anchor_continues_with_the_step_of_that_round(
    world: World,
) -> None:
    world.ready(start=0)
    drawn = world.ready(start=1, round_number=1, exact_step=1)
    assert world.loop.server is not None and world.loop.server.round == world.agreement.round == 1
    windows = [each.window for each in drawn if isinstance(each, DrawMicrobatch)]
    assert windows and min(window for window in windows if window is not None) >= COUNT * TABLE.microbatch


async def test_microbatches_of_a_new_round_are_drawn_for_that_round(world: World) -> None:
    """They were chosen by the round that is over, at the step of the new one."""
    for message in [each for each in world.ready(start=0) if isinstance(each, DrawMicrobatch)]:
        world.stage.on_trainer_message(MicrobatchDrawn(serial=message.serial))
    world.take_commands()
    chosen = list[int]()
    wanted = world.agreement.wanted

    def note(started: Any, now: float) -> list[int]:
        chosen.append(world.agreement.round)
        return wanted(started, now)

    world.agreement.wanted = note  # type: ignore[method-assign]
    world.stage.on_trainer_message(AnchorApplied(round=1, exact_step=1))
    assert chosen and set(chosen) == {1}


async def test_what_was_computed_on_another_chain_counts_no_more(world: World) -> None:
    """Its anchor may be of the same round; the trainer has dropped its sum. Control: the next round of ours."""
    world.ready(start=0)
    first = world.loop.life
    world.stage.on_trainer_message(AnchorApplied(round=1, exact_step=1))
    assert world.loop.life == first
    world.agreement.add(2, 0.0)
    world.stage.on_trainer_message(AnchorApplied(round=1, exact_step=1))
    assert world.loop.life > first and not world.agreement.ledger
