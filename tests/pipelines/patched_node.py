"""A node of a pipeline with a fault, or without a defence: `python -m tests.pipelines.patched_node WORDS join RUN ...`.

WORDS are names of `PATCHES`, separated by commas.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli import main
from node.injected_faults import VARIABLE
from node.model import shapes_of
from protocol.blobs.blob import Blob
from protocol.blobs.server import BlobService
from protocol.blobs.wire_format import Chunk
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import FetchRequest
from protocol.pipeline import balance, exact
from protocol.pipeline.balance import MOVABLE, PINNED, Balancer, Move, StageAssignment, choose_move
from protocol.pipeline.exact import StepAgreement
from protocol.pipeline.stage import StageManifest

MOVE = "move"
CHUNKS = 3
FATAL_SUM = 2  # the sum of the second round


def _die_while_a_sum_travels(manifest: Manifest) -> None:
    """Die once another peer has a third of our second sum."""
    sizes = {2 + 8 * shapes_of(StageManifest.of(manifest, stage)).numel for stage in range(manifest.pipeline.stages)}
    seen: set[bytes] = set()
    send_all = BlobService._chunks

    async def send_some(self: BlobService, blob: Blob, request: FetchRequest) -> AsyncIterator[Chunk]:
        if blob.size in sizes:
            seen.add(blob.digest)
            self._limits = replace(self._limits, chunk_bytes=blob.size // CHUNKS)
        async for chunk in send_all(self, blob, request):
            yield chunk
            if blob.size in sizes and len(seen) == FATAL_SUM:
                os.kill(os.getpid(), signal.SIGKILL)

    pytest.MonkeyPatch().setattr(BlobService, "_chunks", send_some)


def _own_every_microbatch(manifest: Manifest) -> None:
    wanted = StepAgreement.wanted

    def want_all(self: StepAgreement, started: Collection[int], now: float) -> list[int]:
        self._turns = {(self._me, 0): list(range(self.count))}
        return wanted(self, started, now)

    pytest.MonkeyPatch().setattr(StepAgreement, "wanted", want_all)


def _count_incomplete_steps(manifest: Manifest) -> None:
    pytest.MonkeyPatch().setattr(exact, "covers_step", lambda ledgers, count: True)


def _move_once_told(manifest: Manifest) -> None:
    """Move within seconds, once the file `MOVE` is beside the manifest."""
    patch, told = pytest.MonkeyPatch(), Path(sys.argv[2]).parent / MOVE
    patch.setattr(balance, "PERIOD_EXPIRIES", 0.5)
    on_commit = Balancer.on_commit

    def wait(self: Balancer, seats: Sequence[StageAssignment], now: float) -> Move | None:
        return on_commit(self, seats, now) if told.exists() else None

    patch.setattr(Balancer, "on_commit", wait)


def _choose_alone(manifest: Manifest) -> None:
    """Move if that alone would help by the records of the commit before, whoever else moves, and without a claim."""
    told, known = Path(sys.argv[2]).parent / MOVE, list[StageAssignment]()

    def decide(self: Balancer, seats: Sequence[StageAssignment], now: float) -> Move | None:
        if not told.exists():
            known[:] = [replace(seat, move=PINNED if seat.peer != self._me else MOVABLE) for seat in seats]
            return None
        return choose_move(known, self._stages)

    pytest.MonkeyPatch().setattr(Balancer, "on_commit", decide)


def _add_always(manifest: Manifest) -> None:
    os.environ[VARIABLE] = "adds=always"


PATCHES: Mapping[str, Callable[[Manifest], None]] = {
    "dies while its sum travels": _die_while_a_sum_travels,
    "owns every microbatch": _own_every_microbatch,
    "moves once told": _move_once_told,
    "chooses alone": _choose_alone,
    "counts incomplete steps": _count_incomplete_steps,
    "adds always": _add_always,
}

if __name__ == "__main__":
    for word in filter(None, sys.argv.pop(1).split(",")):
        PATCHES[word](load_manifest(Path(sys.argv[2])))
    main()
