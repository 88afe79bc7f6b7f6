"""Replicate the states of pipeline stages: a host stores all stages, each peer one besides the one that it trains.

So a stage whose peers have all left can start again from its newest stored state. Each stage has its own folder,
`stage-N`, in the folder of the node.
"""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Sequence

from node.daemon.node import Node
from node.daemon.stored_states.announcing import StageAnnouncer, StoredStageList
from node.daemon.stored_states.choice import RoundFilter, choose_kept_stage
from node.daemon.stored_states.state_store import (
    DISK_RETRY_SECONDS,
    LINK_SHARE,
    MAX_REQUESTS,
    StateStore,
    StorePlan,
    build_state_store,
)
from node.disk_budget import DiskRoom, choose_budget
from node.paths import kept_stage_dir, kept_stages_in
from node.run_dir import RunDir
from protocol.blobs.storage import disk_errors
from protocol.errors import MurmurError
from protocol.pipeline.stage import StageManifest
from protocol.tasks import cancel_and_wait, run_periodically, run_until_one_ends

logger = logging.getLogger(__name__)

MIN_SECONDS = 5.0  # between two downloads of a stage
LIST_SECONDS = 2.0  # interval for re-choosing which stages to announce
CHOICE_SECONDS = 10.0  # interval for re-choosing the other stage to store
FIRST_CHOICE_SECONDS = 1.0  # while no stage has a state
PEER_REQUESTS = 2  # pieces in memory, and on the link of a peer that trains


class StageStores:
    """The stores of a node by stage, which share its record, its disk and its link."""

    def __init__(
        self, node: Node, folder: RunDir, stage_list: StoredStageList, round_filter: RoundFilter, max_requests: int,
        room: DiskRoom | None = None,
    ) -> None:  # fmt: skip
        self._node = node
        self._folder = folder
        self._stage_list = stage_list
        self._round_filter = round_filter
        self._max_requests = max_requests
        self._room = room
        self._stores: dict[int, StateStore] = {}
        self._past_refusals: Counter[str] = Counter()
        node.metrics.add_refusal_counter(self)

    @property
    def refusals(self) -> Counter[str]:
        """Return the refusals of all downloads, including those of removed stages."""
        return sum((store.refusals for store in self._stores.values()), Counter(self._past_refusals))

    @property
    def bytes_received(self) -> int:
        """Return the bytes of states received by this process."""
        return sum(store.bytes_received for store in self._stores.values())

    @property
    def state_bytes(self) -> int:
        """Return the size of the states of all stages."""
        return sum(store.folder.state_bytes for store in self._stores.values())

    def add(self, stage: int) -> StateStore:
        """Start storing a stage, with the state that an earlier process stored. Raises MurmurError."""
        folder = RunDir(kept_stage_dir(self._folder.path, stage))
        with disk_errors(folder.path):
            folder.path.mkdir(mode=0o700, exist_ok=True)
        manifest = StageManifest.of(self._node.options.manifest, stage)
        folder.write_stage(stage, manifest.pipeline.stages)
        plan = StorePlan(
            announcer=StageAnnouncer(self._stage_list, stage),
            round_filter=self._round_filter,
            room=self._room,
            max_requests=self._max_requests,
        )
        store = self._stores[stage] = build_state_store(self._node, manifest, folder, plan)
        return store

    async def remove(self, stage: int) -> None:
        """Stop storing a stage, and remove its state from the disk."""
        store = self._stores.pop(stage)
        self._past_refusals += store.refusals
        self._stage_list.withdraw(stage)
        self._round_filter.forget(store.run_id)
        self._node.remove_chain(store.run_id, store.blobs)
        await asyncio.to_thread(shutil.rmtree, kept_stage_dir(self._folder.path, stage), ignore_errors=True)

    async def run(self) -> None:
        """Fetch newer states of the added stages until cancelled."""
        await run_until_one_ends(
            run_periodically(LIST_SECONDS, self._stage_list.refresh), *(store.run() for store in self._stores.values())
        )

    def describe(self) -> str:
        """Describe the stored states, or why some are missing, in one line."""
        if len(self._stores) == 1:
            return next(iter(self._stores.values())).describe()
        if faulty := [store for store in self._stores.values() if store.error]:
            return faulty[0].describe()
        held = {stage: store for stage, store in self._stores.items() if store.blob is not None}
        if not held:
            return "no state of a stage is held yet"
        rounds = [store.chain.round for store in held.values()]
        span = f"round {rounds[0]}" if len(set(rounds)) == 1 else f"rounds {min(rounds)} to {max(rounds)}"
        if len(held) < len(self._stores):
            missing = ", ".join(str(stage) for stage in self._stores if stage not in held)
            return f"holding the states of {len(held)} stages, of {span}; none of stage {missing} yet"
        final = "final " if all(store.is_complete for store in held.values()) else ""
        return f"holding the {final}states of all {len(held)} stages, of {span}"


def keep_stages(node: Node, folder: RunDir, stages: Sequence[int]) -> StageStores:
    """Return the stores of these stages, for a host. Call it before the node opens. Raises MurmurError."""
    stage_list = StoredStageList(node.admitted, is_host=not node.replicas)
    return _store_all(node, folder, stages, stage_list, RoundFilter(MIN_SECONDS, LINK_SHARE))


def gather_stages(node: Node, folder: RunDir, stages: Sequence[int]) -> StageStores:
    """Return the stores of these stages for a node that needs their states soon and does not offer them.

    Call it before the node opens. Raises MurmurError.
    """
    stage_list = StoredStageList(node.admitted, is_host=True, is_public=False)
    return _store_all(node, folder, stages, stage_list, RoundFilter(min_seconds=0.0, link_share=1.0))


def _store_all(
    node: Node, folder: RunDir, stages: Sequence[int], stage_list: StoredStageList, round_filter: RoundFilter
) -> StageStores:
    stores = StageStores(node, folder, stage_list, round_filter, max(1, MAX_REQUESTS // len(stages)))
    for stage in stages:
        stores.add(stage)
    return stores


def build_stage_stores(node: Node, folder: RunDir, own_stage: int | None) -> "StageStores | OtherStageStore | None":
    """Return the stores of a node that trains a stage: all other stages on a host, otherwise one.

    It is `None` for a whole model.
    Call it before the node opens. Raises MurmurError.
    """
    if own_stage is None:
        return None
    if node.options.stays:
        others = [stage for stage in range(node.options.manifest.pipeline.stages) if stage != own_stage]
        return keep_stages(node, folder, others)
    store = OtherStageStore(node, folder, own_stage)
    store.restore()
    return store


class OtherStageStore:
    """Stores one other stage on a node that trains: the one with the fewest stores."""

    def __init__(self, node: Node, folder: RunDir, own_stage: int) -> None:
        self._node = node
        self._folder = folder
        self._own_stage = own_stage
        room = DiskRoom(folder.path, choose_budget(folder.path, node.options.disk))
        stage_list, round_filter = StoredStageList(node.admitted, is_host=False), RoundFilter(MIN_SECONDS, LINK_SHARE)
        self._stores = StageStores(node, folder, stage_list, round_filter, PEER_REQUESTS, room)
        self._current: int | None = None

    def restore(self) -> None:
        """Continue with the stage that an earlier process stored, and remove others. Call it before the node opens."""
        for stage in kept_stages_in(self._folder.path):
            if stage == self._own_stage or self._current is not None or not self._add(stage):
                shutil.rmtree(kept_stage_dir(self._folder.path, stage), ignore_errors=True)

    async def run(self) -> None:
        """Store the chosen stage until cancelled."""
        while True:
            storing = asyncio.create_task(self._stores.run(), name="kept stage")
            try:
                chosen = await self._next_choice(storing)
            finally:
                await cancel_and_wait((storing,))
            if self._current is not None:
                await self._stores.remove(self._current)
                self._current = None
            if not self._add(chosen):
                await asyncio.sleep(DISK_RETRY_SECONDS)

    async def _next_choice(self, storing: asyncio.Task[None]) -> int:
        """Wait until a different stage should be stored, and return it."""
        while True:
            seconds = FIRST_CHOICE_SECONDS if self._current is None else CHOICE_SECONDS
            await asyncio.wait((storing,), timeout=seconds)
            if storing.done():
                await storing
            chosen = self._choose()
            if chosen is not None and chosen != self._current:
                return chosen

    def _choose(self) -> int | None:
        records, stages = self._node.admitted.records(), self._node.options.manifest.pipeline.stages
        return choose_kept_stage(records, stages, self._node.peer_id, self._own_stage, self._current)

    def _add(self, stage: int) -> bool:
        """Start storing a stage; return whether that succeeded."""
        try:
            self._stores.add(stage)
        except MurmurError as error:  # the node's own stage continues
            logger.warning("the state of stage %d is not kept: %s", stage, error)
            return False
        self._current = stage
        logger.info("keeping the newest state of stage %d too, in case its peers vanish", stage)
        return True

    def describe(self) -> str:
        """Describe the stored state in one line; empty before the first choice."""
        return "" if self._current is None else self._stores.describe()
