"""Keep the states of stages of a pipeline: a host keeps all, and each peer keeps one beside the one that it trains.

So a stage whose peers have all gone starts again from its newest kept state. Each stage has a folder of its own,
`stage-N`, in the folder of the node.
"""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Sequence

from node.daemon.node import Node
from node.daemon.stored_states.announcing import KeptBoard, StageAnnouncer
from node.daemon.stored_states.kept_stage import choose_kept_stage
from node.daemon.stored_states.marks import Marks
from node.daemon.stored_states.state_keeper import (
    DISK_RETRY_SECONDS,
    LINK_SHARE,
    MAX_REQUESTS,
    KeeperPlan,
    StateKeeper,
    build_keeper,
)
from node.disk_budget import DiskRoom, choose_budget
from node.paths import kept_stage_dir, kept_stages_in
from node.run_dir import RunDir
from protocol.blobs.storage import disk_errors
from protocol.errors import MurmurError
from protocol.pipeline.stages.stage import StageManifest
from protocol.tasks import cancel_and_wait, run_until_one_ends

logger = logging.getLogger(__name__)

MIN_SECONDS = 5.0  # between two states of a stage that are kept
BOARD_SECONDS = 2.0  # between two looks at the stages that need their state announced most
CHOICE_SECONDS = 10.0  # between two looks at the stage with the fewest keepers
FIRST_CHOICE_SECONDS = 1.0  # the same while no stage has a state
PEER_REQUESTS = 2  # pieces in memory, and on the link of a peer that trains


class StageKeepers:
    """The keepers of a node by stage, which share its record, its disk and its link."""

    def __init__(
        self, node: Node, folder: RunDir, board: KeptBoard, marks: Marks, max_requests: int,
        room: DiskRoom | None = None,
    ) -> None:  # fmt: skip
        self._node = node
        self._folder = folder
        self._board = board
        self._marks = marks
        self._max_requests = max_requests
        self._room = room
        self._keepers: dict[int, StateKeeper] = {}
        self._past_refusals: Counter[str] = Counter()
        node.metrics.add_refusal_counter(self)

    @property
    def refusals(self) -> Counter[str]:
        """Return the refusals of all downloads, also of stages that are kept no longer."""
        return sum((keeper.refusals for keeper in self._keepers.values()), Counter(self._past_refusals))

    @property
    def bytes_received(self) -> int:
        """Return the bytes of states received by this process."""
        return sum(keeper.bytes_received for keeper in self._keepers.values())

    @property
    def state_bytes(self) -> int:
        """Return the size of the states of all stages together."""
        return sum(keeper.folder.state_bytes for keeper in self._keepers.values())

    def add(self, stage: int) -> StateKeeper:
        """Begin to keep a stage, with the state that an earlier process kept. Raises MurmurError."""
        folder = RunDir(kept_stage_dir(self._folder.path, stage))
        with disk_errors(folder.path):
            folder.path.mkdir(mode=0o700, exist_ok=True)
        manifest = StageManifest.of(self._node.options.manifest, stage)
        folder.write_stage(stage, manifest.pipeline.stages)
        plan = KeeperPlan(
            announcer=StageAnnouncer(self._board, stage),
            marks=self._marks,
            room=self._room,
            max_requests=self._max_requests,
        )
        keeper = self._keepers[stage] = build_keeper(self._node, manifest, folder, plan)
        return keeper

    async def remove(self, stage: int) -> None:
        """Keep a stage no longer, and remove its state from the disk."""
        keeper = self._keepers.pop(stage)
        self._past_refusals += keeper.refusals
        self._board.withdraw(stage)
        self._marks.forget(keeper.run_id)
        self._node.remove_chain(keeper.run_id, keeper.store)
        await asyncio.to_thread(shutil.rmtree, kept_stage_dir(self._folder.path, stage), ignore_errors=True)

    async def run(self) -> None:
        """Keep the stages that were added, until cancelled."""
        await run_until_one_ends(self._refresh_forever(), *(keeper.run() for keeper in self._keepers.values()))

    async def _refresh_forever(self) -> None:
        while True:
            self._board.refresh()
            await asyncio.sleep(BOARD_SECONDS)

    def describe(self) -> str:
        """Return one line that says which states are held, or why some are not."""
        if len(self._keepers) == 1:
            return next(iter(self._keepers.values())).describe()
        if faulty := [keeper for keeper in self._keepers.values() if keeper.error]:
            return faulty[0].describe()
        held = {stage: keeper for stage, keeper in self._keepers.items() if keeper.blob is not None}
        if not held:
            return "no state of a stage is held yet"
        rounds = [keeper.chain.round for keeper in held.values()]
        span = f"round {rounds[0]}" if len(set(rounds)) == 1 else f"rounds {min(rounds)} to {max(rounds)}"
        if len(held) < len(self._keepers):
            missing = ", ".join(str(stage) for stage in self._keepers if stage not in held)
            return f"holding the states of {len(held)} stages, of {span}; none of stage {missing} yet"
        final = "final " if all(keeper.is_complete for keeper in held.values()) else ""
        return f"holding the {final}states of all {len(held)} stages, of {span}"


def keep_stages(node: Node, folder: RunDir, stages: Sequence[int]) -> StageKeepers:
    """Return the keepers of these stages, for a host. Call it before the node opens. Raises MurmurError."""
    board = KeptBoard(node.directory, is_host=not node.replicas)
    return _keep_all(node, folder, stages, board, Marks(MIN_SECONDS, LINK_SHARE))


def gather_stages(node: Node, folder: RunDir, stages: Sequence[int]) -> StageKeepers:
    """Return the keepers of these stages for a node that wants their states soon, and offers them to nobody.

    Call it before the node opens. Raises MurmurError.
    """
    board = KeptBoard(node.directory, is_host=True, is_public=False)
    return _keep_all(node, folder, stages, board, Marks(min_seconds=0.0, link_share=1.0))


def _keep_all(node: Node, folder: RunDir, stages: Sequence[int], board: KeptBoard, marks: Marks) -> StageKeepers:
    keepers = StageKeepers(node, folder, board, marks, max(1, MAX_REQUESTS // len(stages)))
    for stage in stages:
        keepers.add(stage)
    return keepers


def build_stage_keepers(node: Node, folder: RunDir, own_stage: int | None) -> "StageKeepers | OtherStageKeeper | None":
    """Return the keepers of a node that trains a stage: of all others on a host, else of one; None for a whole model.

    Call it before the node opens. Raises MurmurError.
    """
    if own_stage is None:
        return None
    if node.options.stays:
        others = [stage for stage in range(node.options.manifest.pipeline.stages) if stage != own_stage]
        return keep_stages(node, folder, others)
    keeper = OtherStageKeeper(node, folder, own_stage)
    keeper.restore()
    return keeper


class OtherStageKeeper:
    """Keeps one other stage on a node that trains: the one with the fewest keepers."""

    def __init__(self, node: Node, folder: RunDir, own_stage: int) -> None:
        self._node = node
        self._folder = folder
        self._own_stage = own_stage
        room = DiskRoom(folder.path, choose_budget(folder.path, node.options.disk))
        board, marks = KeptBoard(node.directory, is_host=False), Marks(MIN_SECONDS, LINK_SHARE)
        self._keepers = StageKeepers(node, folder, board, marks, PEER_REQUESTS, room)
        self._current: int | None = None

    def restore(self) -> None:
        """Take up the stage that an earlier process kept, and remove all else. Call it before the node opens."""
        for stage in kept_stages_in(self._folder.path):
            if stage == self._own_stage or self._current is not None or not self._add(stage):
                shutil.rmtree(kept_stage_dir(self._folder.path, stage), ignore_errors=True)

    async def run(self) -> None:
        """Keep the chosen stage until cancelled."""
        while True:
            keeping = asyncio.create_task(self._keepers.run(), name="kept stage")
            try:
                chosen = await self._next_choice(keeping)
            finally:
                await cancel_and_wait((keeping,))
            if self._current is not None:
                await self._keepers.remove(self._current)
                self._current = None
            if not self._add(chosen):
                await asyncio.sleep(DISK_RETRY_SECONDS)

    async def _next_choice(self, keeping: asyncio.Task[None]) -> int:
        """Return another stage than the present one once it is to be kept."""
        while True:
            seconds = FIRST_CHOICE_SECONDS if self._current is None else CHOICE_SECONDS
            await asyncio.wait((keeping,), timeout=seconds)
            if keeping.done():
                await keeping
            chosen = self._choose()
            if chosen is not None and chosen != self._current:
                return chosen

    def _choose(self) -> int | None:
        [replica] = self._node.replicas.values()
        records, stages = replica.peers.swarm_view.admitted_records(), self._node.options.manifest.pipeline.stages
        return choose_kept_stage(records, stages, self._node.peer_id, self._own_stage, self._current)

    def _add(self, stage: int) -> bool:
        """Begin to keep a stage; return False if the disk refuses, or holds nothing of use."""
        try:
            self._keepers.add(stage)
        except MurmurError as error:  # the node's own stage goes on
            logger.warning("the state of stage %d is not kept: %s", stage, error)
            return False
        self._current = stage
        logger.info("keeping the newest state of stage %d too, in case its peers vanish", stage)
        return True

    def describe(self) -> str:
        """Return one line about the kept state; empty before the first choice."""
        return "" if self._current is None else self._keepers.describe()
