"""Repeat the work of another peer from its work record, to compute the contribution that it should have made.

The auditor writes a job as a folder of files, which a separate process reads (`python -m node.daemon.audits FOLDER`):

job.json        the run, the peer, the work record
state           the inner state before the work, if there is one
anchor-ROUND    the shared vectors of a round, flat fp32
part-NUMBER     the parts of the contribution, if it was made on another kind of device

On the same kind of device every bit has to agree. On another kind rounding differs, and the difference grows with each
step; so there the distance of the contribution decides (`benchmarks/audit_tolerance.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat
from torch import Tensor

from node.daemon.audits.work_log import InnerState
from node.data import Corpus
from node.model import LanguageModel
from node.options import Device
from node.simulation.virtual.trainer import VirtualTrainer
from node.step_settings import StepSettings
from optim.errors import CodecError
from optim.exchange import ContributionEncoder
from optim.round_plan import RoundPlanner
from protocol.audits import BlobName, WorkRecord
from protocol.blobs.blob import Blob, Bytes
from protocol.consensus.messages.contributions import Contribution
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest

TOLERANCE = 0.2  # of a contribution from another kind of device (`distance`)
MAX_GAP = 1e9  # JSON has no infinity
LOSS_TOLERANCE = 0.05
Anchors = Mapping[int, Tensor]  # the concatenated shared vectors by round, weights first
JOB_FILE = "job.json"
STATE_FILE = "state"


class RepeatedWork(BaseModel):
    """The result of repeated work: the names of the parts, the counts, and the inner state afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parts: tuple[BlobName, ...]
    tokens: int
    steps: int
    loss: FiniteFloat
    after: BlobName

    def find_difference(self, contribution: Contribution, record: WorkRecord) -> str:
        """Return the first difference from the peer's contribution; empty if every bit agrees."""
        if tuple(part.blob for part in self.parts) != contribution.parts:
            return "other values"
        if (self.tokens, self.steps) != (contribution.tokens, contribution.steps):
            return "other counts"
        if self.loss != contribution.loss:
            return "another loss"
        return "" if self.after == record.after else "another state"

    def find_false(self, contribution: Contribution, gap: float) -> str:
        """Return the first difference that no other kind of device explains; empty if there is none.

        Args:
            contribution: that of the peer.
            gap: the distance of its values.
        """
        if (self.tokens, self.steps) != (contribution.tokens, contribution.steps):
            return "other counts"
        if not abs(self.loss - contribution.loss) <= LOSS_TOLERANCE * abs(self.loss):
            return "another loss"
        return "" if gap <= TOLERANCE else f"values at a distance of {gap:.2g}"


def decode_parts(planner: RoundPlanner, round_number: int, payloads: Sequence[Bytes]) -> Tensor:
    """Return the values of a contribution made for a round. Raises CodecError."""
    plan = planner.plan(round_number)
    pairs = zip(payloads, plan.parts, strict=True)
    return torch.cat([codec.decode(payload, stop - start) for payload, (codec, (start, stop)) in pairs])


def distance(values: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, as a share of the norm of the expected values."""
    norm, difference = float(expected.norm()), float((values - expected).norm())
    if math.isnan(difference):
        return math.inf
    return difference / norm if norm else difference


class Repeater:
    """Repeats work of one run in this process; `settings_at` returns the settings of a round's inner steps."""

    def __init__(
        self,
        manifest: Manifest,
        planner: RoundPlanner,
        corpus: Corpus,
        settings_at: Callable[[int], StepSettings],
        build_model: Callable[[], LanguageModel],
    ) -> None:
        self._manifest = manifest
        self._planner = planner
        self._corpus = corpus
        self._settings_at = settings_at
        self._build_model = build_model

    def repeat(self, peer: PeerId, record: WorkRecord, before: InnerState | None, anchors: Anchors) -> RepeatedWork:
        """Repeat the work of a peer; `before` is the state before it, `None` for the first contribution.

        Raises:
            MalformedError: the record and the state do not fit together.
        """
        return self._repeat(peer, record, before, anchors)[0]

    def measure(
        self, peer: PeerId, record: WorkRecord, before: InnerState | None, anchors: Anchors, claimed: Sequence[Bytes]
    ) -> tuple[RepeatedWork, float]:
        """Repeat the work of a peer on another kind of device, and measure its distance. Raises MalformedError."""
        repetition, made = self._repeat(peer, record, before, anchors)
        try:
            values = decode_parts(self._planner, record.round, claimed)
        except (CodecError, ValueError) as error:
            raise MalformedError(f"a contribution that does not decode: {error}") from error
        return repetition, min(MAX_GAP, distance(values, decode_parts(self._planner, record.round, made)))

    def _repeat(
        self, peer: PeerId, record: WorkRecord, before: InnerState | None, anchors: Anchors
    ) -> tuple[RepeatedWork, Sequence[Bytes]]:
        trainer = self._restore(peer, record, before, anchors)
        pending = list(record.trace.anchors)
        while True:
            made = trainer.state.counters.since_message.steps
            while pending and pending[0].steps == made:
                anchor = pending.pop(0)
                trainer.apply_known_anchor(anchor.round, [anchors[anchor.round]], anchor.outcome)
                trainer.use_settings(self._settings_at(anchor.round))
            if made >= record.trace.steps:
                break
            trainer.step()
        if pending or trainer.state.counters.round != record.round:
            raise MalformedError("a work record whose anchors do not lead to its round")
        header, payloads = trainer.make_contribution()
        trainer.state.save()
        state = InnerState.copy_of(trainer.shared_memory, header.serial)
        assert state is not None
        repetition = RepeatedWork(
            parts=tuple(BlobName.of(Blob.of(payload)) for payload in payloads),
            tokens=header.tokens,
            steps=header.steps,
            loss=header.loss,
            after=BlobName.of(Blob.of(*state.to_bytes())),
        )
        return repetition, payloads

    def _restore(self, peer: PeerId, record: WorkRecord, before: InnerState | None, anchors: Anchors) -> VirtualTrainer:
        start = record.trace.start if before is None else before.counters.round
        if start is None:
            raise MalformedError("a work record without a state before it")
        settings = self._settings_at(start)
        train = settings.train.model_copy(update={"microbatch": record.conditions.microbatch})
        trainer = VirtualTrainer(
            self._build_model(),
            self._manifest.model_copy(update={"train": train}),
            self._planner,
            self._corpus,
            ContributionEncoder(self._planner),
            peer,
        )
        if before is None:
            trainer.start(start, [anchors[start]])
        else:
            trainer.restore(before.vectors, before.counters, before.outbox)
        trainer.use_settings(settings)
        if trainer.state.counters.position != record.position:
            raise MalformedError("a work record that names another position of the text")
        return trainer


class RepeatJob(BaseModel):
    """The work to repeat; `settings` has the settings of inner steps by round, `base` is the folder of the text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    manifest: str
    base: str
    device: Device
    peer: str
    record: WorkRecord
    settings: dict[int, StepSettings]
    claimed_parts: int = 0  # of a contribution from another kind of device

    def write(
        self, folder: Path, state: bytes | bytearray | None, anchors: Mapping[int, Tensor], claimed: Sequence[Bytes]
    ) -> None:
        """Write the job; `claimed` are the parts of a contribution from another kind of device."""
        (folder / JOB_FILE).write_text(self.model_dump_json(), encoding="utf-8")
        if state is not None:
            (folder / STATE_FILE).write_bytes(state)
        for number in self.record.anchor_rounds:
            anchors[number].numpy().tofile(_anchor_path(folder, number))
        for number, content in enumerate(claimed):
            (folder / _part_name(number)).write_bytes(content)


class JobResult(BaseModel):
    """The repeated work, or the fault of a malformed record or state, or the reason why it cannot be repeated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repetition: RepeatedWork | None = None
    gap: float | None = None  # of work from another kind of device
    malformed: str = ""
    obstacle: str = ""


def read_state(folder: Path) -> bytearray | None:
    path = folder / STATE_FILE
    return bytearray(path.read_bytes()) if path.exists() else None


def read_claimed(folder: Path, count: int) -> list[bytes]:
    return [(folder / _part_name(number)).read_bytes() for number in range(count)]


def read_anchors(folder: Path, record: WorkRecord) -> dict[int, Tensor]:
    return {
        number: torch.frombuffer(bytearray(_anchor_path(folder, number).read_bytes()), dtype=torch.float32)
        for number in record.anchor_rounds
    }


def _part_name(number: int) -> str:
    return f"part-{number}"


def _anchor_path(folder: Path, number: int) -> Path:
    return folder / f"anchor-{number}"
