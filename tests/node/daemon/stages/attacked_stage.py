"""A stage that strangers attack: its real machines, activation store, fetcher and trainer, with every blob in one dict.

Only the network is missing: `Shelf` stands for the downloader, and gives a blob to whoever names its digest.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from node.daemon.inbox import Inbox
from node.daemon.stages.activations import ActivationFetcher, ActivationStore, neighbour_runs, slot_sizes
from node.daemon.stages.stage_effects import NodeStages, StageEffects
from node.data import BatchReader, Corpus
from node.data.corpus import TokenArray
from node.loop.stage_events import PeersSeen
from node.loop.stage_loop import build_stage_loop
from node.model import build_model, cut_of, initial_weights
from node.processes.workers import BackgroundTasks
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import Ready
from node.trainer.stages.stage_work import StageWork
from protocol.blobs.blob import Blob
from protocol.blobs.store import BlobStore
from protocol.errors import GoneError, PeerFault
from protocol.identity import Identity, PeerId
from protocol.manifest.sections import PipelineSection
from protocol.membership.peer_table import FieldValue
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.exact import StepReports
from protocol.pipeline.messages import HeldBlob, Inputs, Outcome, Task
from protocol.pipeline.results import Contradiction
from protocol.pipeline.routing import StagePeer
from protocol.pipeline.stage import StageManifest
from tests.node.small_run import MANIFEST, admitted_of

torch.set_num_threads(1)
ME, OWNER, STRANGER, HOLDER = "me", "owner", "stranger", "holder"
STAGES = 3
MODEL = MANIFEST.model.model_copy(update={"width": 16, "layers": 3, "tied": False})


class Directory:
    """Counts refusals by peer; everybody is live."""

    peer_id, start = ME, 1 << 63

    def __init__(self) -> None:
        self.refused: list[tuple[PeerId, PeerFault]] = []

    def live(self) -> dict[PeerId, PeerRecord]:
        return {HOLDER: PeerRecord(), OWNER: PeerRecord(), STRANGER: PeerRecord()}

    def record_refusal(self, peer: PeerId, fault: PeerFault) -> None:
        self.refused.append((peer, fault))

    def publish(self, *, urgent: bool = False, **fields: FieldValue) -> None:
        pass

    update = publish


class Shelf:
    """The blobs of all peers, as the downloader of one store."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.contents: dict[bytes, bytes] = {}

    def put(self, content: bytes) -> Blob:
        blob = Blob.of(content)
        self.contents[blob.digest] = content
        return blob

    async def fetch(self, blob: Blob, holders: Callable[[], list[PeerId]], *_: Any, **__: Any) -> None:
        await asyncio.sleep(0)
        if not self.store.has(blob.digest):
            if blob.digest not in self.contents:
                raise GoneError("nobody has it")
            self.store.put_in_memory(self.contents[blob.digest])


class Calls:
    """Takes the outcomes for owners."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[PeerId, Outcome]] = []
        self.contradictions: list[tuple[PeerId, Contradiction]] = []
        self.answering: dict[PeerId, None] = {}

    async def contradict(self, peer: PeerId, found: Contradiction) -> None:
        self.contradictions.append((peer, found))

    async def tell(self, peer: PeerId, outcome: Outcome) -> None:
        self.outcomes.append((peer, outcome))

    async def invite(self, peer: PeerId, run: str) -> None:
        pass


class AttackedStage:
    """A stage in the middle (1) or at the end (2) of three, in local steps of four microbatches."""

    def __init__(self, folder: Path, number: int = 1, activations: str = "fp32") -> None:
        table = PipelineSection.model_validate(
            {"stages": STAGES, "microbatch": 2, "activations": activations, "in_flight": 2, "memory": 1 << 20}
        )
        train = MANIFEST.train.model_copy(update={"batch_tokens": 4 * 2 * MODEL.context})
        self.manifest = StageManifest.of(
            MANIFEST.model_copy(update={"model": MODEL, "pipeline": table, "train": train}), number
        )
        self.sizes = slot_sizes(self.manifest)
        self.memory = ActivationMemory.create(self.sizes)
        store = BlobStore(folder, self.sizes.total_bytes, self.sizes.total_bytes)
        self.activations = ActivationStore(self.memory, store)
        self.shelf, self.calls, self.directory = Shelf(store), Calls(), Directory()
        self.node, self.inbox = NodeStages(admitted_of(self.directory, stages=STAGES), cast(Any, self.calls)), Inbox()
        fetcher = ActivationFetcher(
            cast(Any, self.directory),
            self.node.blobs,
            cast(Any, self.shelf),
            self.activations,
            neighbour_runs(self.manifest),
        )
        self.loop = build_stage_loop(self.manifest, ME, 1 << 20, random.Random(0), draws=False)
        record = self.node.records.record_of(self.manifest)
        tasks = BackgroundTasks(self.inbox)
        self.stage = StageEffects(self.loop, self.node, record, fetcher, Identity.create(), tasks, self.inbox)
        self.node.add(self.manifest.run_id, self.stage)
        self.inbox.attach_stage(self.stage.handle)
        self.trainer = self._build_trainer()
        self._begin()

    def _build_trainer(self) -> StageWork:
        row = np.random.default_rng(0).integers(0, 16, 5000, dtype=np.uint8)
        corpus = Corpus.of(TokenArray([row]), TokenArray([row[:100]]), 16)
        cut = cut_of(self.manifest)
        model = build_model(MODEL, cut=cut)
        model.load_flat(initial_weights(MODEL, 0, cut))
        return StageWork(self.manifest, model, self.memory, BatchReader(corpus, MODEL.context, 0, "x"))

    def _begin(self) -> None:
        ready = Ready(device="cpu", step=0, round=0, outstanding=None, start=0)
        self.stage._see_peers = lambda: None  # type: ignore[method-assign]
        self.stage.on_trainer_message(ready)
        self.see_owners(OWNER, STRANGER)

    def see_owners(self, *owners: PeerId) -> None:
        """Let the stage hear of these owners, each of which serves stage 0."""
        entries = tuple(StagePeer(owner, 1, 0, 1.0) for owner in owners)
        seen = PeersSeen((entries, (), ()), dict.fromkeys(owners, 0), StepReports(STAGES))
        self.inbox.post(seen)

    async def settle(self) -> None:
        """Fetch and compute until nothing more happens."""
        queue = self.stage._commands
        for _ in range(50):
            await asyncio.sleep(0)
            while not queue.empty():
                answer = self.trainer.serve(queue.get_nowait())
                if self.trainer.is_step_due:
                    self.trainer.take()
                    self.trainer.take_ledger()
                if answer is not None:
                    self.stage.on_trainer_message(answer)

    def activation(self, seed: int) -> Blob:
        """Return an activation, or a gradient of one, that peers can fetch."""
        values = torch.randn(2, MODEL.context, MODEL.stream_width, generator=torch.Generator().manual_seed(seed))
        payload = self.trainer._format.encode(values)
        return self.shelf.put(payload.numpy().tobytes())

    def tokens(self, seed: int) -> Blob:
        """Return tokens that peers can fetch."""
        drawn = np.random.default_rng(seed).integers(0, 16, self.sizes.token_bytes // 4, dtype=np.int32)
        return self.shelf.put(drawn.tobytes())

    def task(
        self, serial: int, direction: str, activation: Blob, second: Blob | None = None, owner: PeerId = STRANGER
    ) -> Task:
        """Return a task of this stage; `second` is its gradient, or its tokens at the last stage."""
        is_last = self.manifest.stage == STAGES - 1
        held = HeldBlob(second, HOLDER) if second is not None else None
        inputs = Inputs(HeldBlob(activation, HOLDER), *((held, None) if is_last else (None, held)))
        return Task(self.manifest.run_id, owner, serial, cast(Any, direction), 1, 0, 0, inputs, 60_000)

    def statuses(self, owner: PeerId) -> list[str]:
        """Return how the tasks of an owner ended."""
        return [outcome.status for peer, outcome in self.calls.outcomes if peer == owner]

    @property
    def free_slots(self) -> int:
        return sum(map(len, self.activations._free.values()))
