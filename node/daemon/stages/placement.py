"""Choose the stage that a node serves, and move the node to another one when the pipeline needs it there.

At the start, --stage decides, otherwise the stage in the folder, otherwise the node takes the weakest stage (ties by
key). Later `protocol.pipeline.balance` decides on moves.
"""

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.peers.run_contacts import find_records
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.stages.stage_peers import list_seats
from node.options import NodeOptions
from node.paths import kept_stage_dir, kept_stages_in
from node.run_dir import RunDir
from protocol.admission import AdmissionPolicy
from protocol.blobs.storage import disk_errors
from protocol.consensus.chain import Chain
from protocol.errors import UsageError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.membership.peer_table import MembershipEvent
from protocol.membership.record_fields import MAX_MORE_STAGES, records_by_stage
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.balance import PINNED, Balancer, Move, sum_rates
from protocol.pipeline.stage import StageManifest

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # between two checks of the chain's round


@dataclass(frozen=True)
class StageChoice:
    """A stage, and why a node serves it."""

    stage: int
    reason: str


async def choose_stages(options: NodeOptions, folder: RunDir, peer_id: PeerId) -> list[tuple[Manifest, RunDir]]:
    """Return the manifests of the stages that this node serves, each with its folder.

    A run without stages has one, the manifest itself. Raises UsageError as `choose_stage` does.
    """
    stages = options.manifest.pipeline.stages
    if not options.manifest.pipeline.is_cut or not _serves_all(options, folder):
        return [(await choose_stage(options, folder, peer_id), folder)]
    if options.manifest.pipeline.is_exact:
        raise UsageError('--stage all: with pipeline.mode = "exact" a node serves one stage; name its number')
    if stages > MAX_MORE_STAGES + 1:
        raise UsageError(f"--stage all: a node serves at most {MAX_MORE_STAGES + 1} stages, and this run has {stages}")
    logger.info("serving all %d stages", stages)
    return [(StageManifest.of(options.manifest, stage), _folder_of(folder, stage, stages)) for stage in range(stages)]


def _serves_all(options: NodeOptions, folder: RunDir) -> bool:
    """Return whether --stage or the folder selects all stages. Raises UsageError if they contradict each other."""
    one, has_all = folder.read_stage(), folder.read_stage() is None and bool(kept_stages_in(folder.path))
    if options.stage == "all" and one is not None:
        raise UsageError(f"--stage: {folder.path} holds stage {one}, not all; give the node another --dir")
    if isinstance(options.stage, int) and has_all:
        raise UsageError(f"--stage: {folder.path} holds all stages, not {options.stage}; give the node another --dir")
    return options.stage == "all" or has_all


def _folder_of(folder: RunDir, stage: int, stages: int) -> RunDir:
    place = RunDir(kept_stage_dir(folder.path, stage))
    with disk_errors(place.path):
        place.path.mkdir(mode=0o700, exist_ok=True)
    place.write_stage(stage, stages)
    return place


async def choose_stage(options: NodeOptions, folder: RunDir, peer_id: PeerId) -> Manifest:
    """Return the manifest of the stage that this node serves; the manifest itself in a run with one stage.

    Unless the user or the folder names a stage, the contacts are asked for the records of all peers. Nodes that join at
    the same moment may take the same stage. Raises UsageError if there is no such stage, or the folder holds another.
    """
    manifest = options.manifest
    choice = pinned_stage(manifest, options.stage, folder)
    if not manifest.pipeline.is_cut:
        return manifest
    if choice is None:
        found = await find_records(manifest, options.contacts) if options.contacts else {}
        gate, now = AdmissionPolicy(manifest), time.time()
        records = {peer: record for peer, record in found.items() if gate.admits(peer, record.ticket, now)}
        choice = weakest_stage(records, manifest.pipeline.stages, peer_id)
    logger.info("serving stage %d of %d: %s", choice.stage, manifest.pipeline.stages, choice.reason)
    folder.write_stage(choice.stage, manifest.pipeline.stages)
    return StageManifest.of(manifest, choice.stage)


def pinned_stage(manifest: Manifest, wanted: int | str | None, folder: RunDir) -> StageChoice | None:
    """Return the stage that the user or the folder names; None if neither does. Raises UsageError."""
    stages = manifest.pipeline.stages
    if not manifest.pipeline.is_cut:
        if wanted is not None:
            raise UsageError("--stage: every peer of this run trains the whole model; leave the option out")
        return None
    if isinstance(wanted, int) and wanted >= stages:
        raise UsageError(f"--stage: this run has the stages 0 to {stages - 1}, not {wanted}")
    before = folder.read_stage()
    if before is not None and wanted not in (None, before):
        raise UsageError(f"--stage: {folder.path} holds stage {before}, not {wanted}; give the node another --dir")
    if before is not None:
        return StageChoice(before, "its folder holds that one")
    return StageChoice(wanted, "as --stage says") if isinstance(wanted, int) else None


def change_stage(folder: RunDir, stage: int, stages: int) -> None:
    """Prepare a folder for another stage: delete state, and set aside files with votes or credit of the old stage.

    Raises StorageError.
    """
    before = folder.read_stage()
    with disk_errors(folder.path):
        for state in (folder.checkpoints, folder.blobs, folder.activations):
            shutil.rmtree(state, ignore_errors=True)
        folder.contribution_file.unlink(missing_ok=True)
        for path in (folder.vote_log, folder.proofs, folder.path / COMMIT_FILE_NAME):
            if path.exists():
                path.rename(_aside(path, before))
            if _aside(path, stage).exists():
                _aside(path, stage).rename(path)
    folder.write_stage(stage, stages)


def _aside(path: Path, stage: int | None) -> Path:
    """Return the name of a stage's file while the node serves another stage."""
    return path.with_name(f"{path.name}.stage-{stage}")


def weakest_stage(records: Mapping[PeerId, PeerRecord], stages: int, me: PeerId) -> StageChoice:
    """Return a stage without peers, otherwise the stage with the lowest sum of reported rates.

    A trainer without a reported rate counts with the median of the known rates.
    """
    rates = _rates_by_stage((record for peer, record in records.items() if peer != me), stages)
    empty = [stage for stage in range(stages) if not rates[stage]]
    if len(empty) == stages:
        return StageChoice(_by_key(me, empty), "no peer that serves a stage is known, so by the key of this node")
    if empty:
        return StageChoice(_by_key(me, empty), "nobody serves it")
    sums = sum_rates(rates)
    chosen = _by_key(me, [stage for stage in range(stages) if sums[stage] <= min(sums)])
    return StageChoice(chosen, f"it is the weakest, {sums[chosen]:.3g} of {max(sums):.3g} microbatches/s")


def _rates_by_stage(records: Iterable[PeerRecord], stages: int) -> list[list[float]]:
    """Return the rates of the trainers of each stage; 0 for a trainer that has not reported one."""
    rates: list[list[float]] = [[] for _ in range(stages)]
    for record in (seen for each in records for seen in records_by_stage(each)):
        if record.role == "trainer" and not record.leaving and 0 < record.stage <= stages:
            rates[record.stage - 1].append(record.stage_rate)
    return rates


def _by_key(peer_id: PeerId, stages: list[int]) -> int:
    """Return one of the stages; keys are spread evenly over them."""
    draw = int.from_bytes(hashlib.sha256(f"murmur stage of {peer_id}".encode()).digest()[:8], "big")
    return stages[draw % len(stages)]


class StageMover:
    """Decides when a node that serves one stage moves to another. `chain`: the chain of its replica."""

    def __init__(self, admitted: AdmittedPeers, manifest: StageManifest, chain: Chain, has_moved: bool) -> None:
        self._admitted = admitted
        self._directory = directory = admitted.directory
        self._stages = manifest.pipeline.stages
        self._chain = chain
        self._balancer = Balancer(directory.peer_id, self._stages, manifest.membership.expiry, manifest.pipeline.speeds)
        self._shown = PINNED
        if has_moved:
            self._balancer.rest(time.monotonic())
        directory.subscribe(self)

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        """Update which peers serve which stages."""
        self._balancer.observe(list_seats(self._admitted.records(), self._stages), time.monotonic())

    async def run(self) -> Move:
        """Wait until this node has to move, and return the move. Call it on the network."""
        last_round = self._chain.round
        while True:
            if self._shown != self._balancer.move:
                self._shown = self._balancer.move
                self._directory.publish(urgent=True, stage_move=self._shown)
            await asyncio.sleep(POLL_SECONDS)
            if self._chain.round == last_round:
                continue
            last_round = self._chain.round
            move = self._balancer.on_commit(list_seats(self._admitted.records(), self._stages), time.monotonic())
            if move is not None:
                return move
