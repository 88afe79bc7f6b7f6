"""A node's disk: what is kept of its state, its blobs and its message."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from node.daemon.checkpoints import checkpoint
from node.daemon.state.checkpointer import KEPT_SECONDS, Checkpointer
from node.daemon.state.contributions import ContributionFile
from node.daemon.state.outer_state import ReplicatedState
from node.loop.contributions import ContributionTracker
from node.loop.steering import unsteered
from node.run_dir import RunDir
from node.trainer.counters import Counters, Outstanding, StepTotals
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from protocol.consensus.messages.contributions import Commit
from tests.node.daemon.recorded_errors import RecordedErrors
from tests.node.small_run import MANIFEST, PROGRAM, RUN_ID, SHAPES, replica_in, store_in

OUTBOX = b"firstsecond"


class CheckpointerSetup:
    def __init__(self, folder: Path, room: int = 1 << 26) -> None:
        self.folder = RunDir(folder)
        self.store = store_in(self.folder.blobs)
        self.sent = ContributionFile(self.folder.contribution_file)
        self.arena = SharedMemory.create(SharedLayout.of(PROGRAM))
        self.adopted = asyncio.Event()
        self.adopts = True
        self.waited: list[int] = []
        self.errors = RecordedErrors()
        self.now, self.round_seconds = 0.0, KEPT_SECONDS
        self.wanted: set[bytes] = set()
        self.carried: set[bytes] = set()
        self.replica: ReplicatedState = replica_in(self.store)
        state: Any = SimpleNamespace(
            run_dir=self.folder,
            run_id=RUN_ID,
            shapes=SHAPES,
            store=self.store,
            shared_memory=self.arena,
            replicated=self.replica,
            steering=unsteered(MANIFEST),
            max_store_bytes=2 * room,
            disk_budget=None,
        )
        self.keeper = Checkpointer(
            state, self.wait_until_applied, self.requested_digests, self.held_digests, self.errors, lambda: self.now
        )

    async def wait_until_applied(self, round_number: int) -> bool:
        self.waited.append(round_number)
        await self.adopted.wait()
        return self.adopts

    def requested_digests(self) -> set[bytes]:
        return self.wanted

    def held_digests(self) -> set[bytes]:
        return self.carried

    def snapshot(self, outstanding: int | None = None) -> None:
        sizes, work = (5, 6), StepTotals(tokens=100, steps=5, loss=15.0)
        waiting = None if outstanding is None else Outstanding(round=outstanding, sizes=sizes, work=work)
        held = self.arena.layout.vectors
        vectors = {name: torch.full((size,), float(place)) for place, (name, size) in enumerate(held)}
        self.arena.contribution_buffer[: len(OUTBOX)] = OUTBOX
        self.arena.write_snapshot(vectors, Counters(round=3, outstanding=waiting).model_dump(mode="json"))

    async def pruned(self, offers: ContributionTracker, commits: Sequence[Commit]) -> None:
        self.now += self.round_seconds
        await self.keeper.retain_state(self.replica.blob)
        self.keeper.prune_blobs(offers, commits)

    def saved(self) -> list[int]:
        folder = self.folder.checkpoints
        return sorted(int(path.name.split("-")[-1]) for path in folder.iterdir()) if folder.is_dir() else []

    def loaded(self) -> checkpoint.Checkpoint:
        found, skipped = checkpoint.load_newest(self.folder.checkpoints, RUN_ID, SHAPES)
        assert found is not None and not skipped
        return found
