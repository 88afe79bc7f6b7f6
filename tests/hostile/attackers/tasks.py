"""Strangers that send tasks to the servers of a pipeline: other inputs, no backward passes, gradients without forwards.

A stranger announces itself as a trainer that rests, so that honest owners send it nothing.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from node.daemon.stages.calls import StageCalls
from node.loop.stage_loop import stage_settings
from protocol.blobs.blob import Blob
from protocol.blobs.server import BlobService, register_blob_service
from protocol.blobs.store import BlobStore
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import AskReply, ContradictReply, InviteReply, ReleaseReply, StepReply, TellReply
from protocol.murmur_pb2_grpc import StagesServicer, add_StagesServicer_to_server
from protocol.pipeline.messages import MAX_DEADLINE_MS, Answer, Direction, HeldBlob, Inputs, Outcome, Task, first_serial
from protocol.pipeline.stage import StageManifest
from protocol.transport.transport import caller
from tests.hostile.attackers.stranger import Stranger

STORE_BYTES = 1 << 28
TASK_SECONDS = 0.1  # between two tasks for a server
OUTCOME_SECONDS = 2.0
SCALE = 0.02  # of invented activations and gradients


class TaskMaker(StagesServicer):
    """Makes tasks with invented inputs in the name of a stranger, and receives their outcomes.

    Create it before the stranger opens.
    """

    def __init__(self, stranger: Stranger) -> None:
        self.stranger = stranger
        self.outcomes: dict[tuple[int, Direction], Outcome] = {}
        self.added = 0
        self._store = BlobStore(stranger.home / "blobs", STORE_BYTES, STORE_BYTES)
        self._calls = StageCalls(stranger.transport)
        self._random = np.random.default_rng()
        self._serials = itertools.count(first_serial(stranger.directory.start))
        self._settings = [
            stage_settings(StageManifest.of(stranger.manifest, stage))
            for stage in range(stranger.manifest.pipeline.stages)
        ]
        stranger.services += [
            partial(register_blob_service, BlobService(self._store, caller)),
            partial(add_StagesServicer_to_server, self),
        ]

    async def Tell(self, request: Any, context: Any) -> TellReply:  # noqa: N802
        self._take(Outcome.from_wire(request, caller(context)))
        return TellReply()

    async def Invite(self, request: Any, context: Any) -> InviteReply:  # noqa: N802
        return InviteReply()

    async def Ask(self, request: Any, context: Any) -> AskReply:  # noqa: N802
        return AskReply(kind="sealed")

    async def Release(self, request: Any, context: Any) -> ReleaseReply:  # noqa: N802
        return ReleaseReply()

    async def State(self, request: Any, context: Any) -> StepReply:  # noqa: N802
        return StepReply()

    async def Contradict(self, request: Any, context: Any) -> ContradictReply:  # noqa: N802
        return ContradictReply()

    def _take(self, outcome: Outcome) -> None:
        print(f"{outcome.direction} {outcome.status}, added: {outcome.added}", flush=True)
        self.outcomes[outcome.serial, outcome.direction] = outcome
        self.added += outcome.added

    def announce(self, stage: int) -> None:
        """Announce a trainer of a stage that rests."""
        self.stranger.directory.publish(
            urgent=True, role="trainer", stage=stage + 1, stage_life=int(time.time() * 1000), resting=True
        )

    async def stage_of(self, victim: PeerId) -> int:
        """Return the stage that an honest peer serves."""
        return (await self.stranger.meet())[victim].stage - 1

    def new_serial(self) -> int:
        return next(self._serials)

    def inputs(self, stage: int, direction: Direction) -> Inputs:
        """Return invented inputs of the right sizes."""
        sizes = self._settings[stage].input_bytes(direction)
        return Inputs(
            **{name: HeldBlob(self._invent(name, size), self.stranger.peer_id) for name, size in sizes.items()}
        )

    def _invent(self, name: str, size: int) -> Blob:
        if name == "tokens":
            return self._store.put_in_memory(self._random.integers(32, 127, size // 4, dtype=np.int32).tobytes())
        noise = self._random.standard_normal(size // 4, dtype=np.float32) * np.float32(SCALE)
        return self._store.put_in_memory(noise.tobytes())

    async def ask(
        self, victim: PeerId, stage: int, serial: int, direction: Direction, inputs: Inputs, **changes: Any
    ) -> Answer | None:
        """Send a task, and return the answer; None if there is none."""
        record = self.stranger.directory.live().get(victim)
        values: dict[str, Any] = {"attempt": 1, "life": 0, "deadline_ms": MAX_DEADLINE_MS} | changes
        run, number = self._settings[stage].run, record.round if record is not None else 0
        task = Task(
            run, self.stranger.peer_id, serial, direction, round=number, inputs=inputs, **values
        )  # fmt: skip
        try:
            answer = await self._calls.ask(victim, task)
        except (UnreachableError, PeerFault) as error:
            print(f"{victim[-6:]}: {error}", flush=True)
            return None
        print(f"{victim[-6:]}: {direction} {answer.kind}", flush=True)
        if answer.outcome is not None:
            self._take(answer.outcome)
        return answer

    async def outcome(self, serial: int, direction: Direction) -> Outcome | None:
        """Wait for the outcome of a task; None if there is none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTCOME_SECONDS):
                while (serial, direction) not in self.outcomes:
                    await asyncio.sleep(0.02)
        return self.outcomes.get((serial, direction))


async def _prepare(stranger: Stranger) -> tuple[TaskMaker, Sequence[tuple[PeerId, int]]]:
    """Announce a trainer, and return its tasks and the honest peers with their stages."""
    maker = TaskMaker(stranger)
    await stranger.open()
    await stranger.meet()
    maker.announce(0)
    return maker, [(victim, await maker.stage_of(victim)) for victim in stranger.victims]


async def other_inputs(stranger: Stranger) -> None:
    """Attack B: a backward pass names other inputs than its forward pass had, or none at all."""
    maker, victims = await _prepare(stranger)
    stranger.begin()
    while True:
        for victim, stage in victims:
            serial = maker.new_serial()
            answer = await maker.ask(victim, stage, serial, "forward", maker.inputs(stage, "forward"))
            if answer is not None and answer.kind == "accepted" and await maker.outcome(serial, "forward") is not None:
                await maker.ask(victim, stage, serial, "backward", maker.inputs(stage, "backward"))
            await maker.ask(victim, stage, maker.new_serial(), "backward", Inputs())
        await asyncio.sleep(TASK_SECONDS)


async def _ask_all(maker: TaskMaker, victims: Sequence[tuple[PeerId, int]], direction: Direction) -> None:
    """Send each honest peer one pass of a microbatch of its own, and pause."""
    for victim, stage in victims:
        await maker.ask(victim, stage, maker.new_serial(), direction, maker.inputs(stage, direction))
    await asyncio.sleep(TASK_SECONDS)


async def withheld_backwards(stranger: Stranger) -> None:
    """Attack C: forward passes take the places of all steps, and no backward pass follows them."""
    maker, victims = await _prepare(stranger)
    stranger.begin()
    while True:
        await _ask_all(maker, victims, "forward")


async def invented_gradients(stranger: Stranger) -> None:
    """Attack F: backward passes without a forward pass, so that a step is made of the gradients of a stranger."""
    maker, victims = await _prepare(stranger)
    stranger.begin()
    while True:
        await _ask_all(maker, victims, "backward")
        stranger.note(added=maker.added)
