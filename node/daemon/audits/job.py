"""The repetition of one contribution as a folder of files, which a process of its own reads.

job.json        the run, the peer, the work record
state           the inner state before the work, if there is one
anchor-ROUND    the shared vectors of a round, flat fp32
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from node.daemon.audits.repeater import Repetition
from node.options import Device
from node.step_settings import StepSettings
from protocol.audits import WorkRecord

JOB_FILE = "job.json"
STATE_FILE = "state"


class RepeatJob(BaseModel):
    """The work to repeat; `settings` are those of the inner steps by round, `base` is the folder of the text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    manifest: str
    base: str
    device: Device
    peer: str
    record: WorkRecord
    settings: dict[int, StepSettings]

    def write(self, folder: Path, state: bytes | bytearray | None, anchors: Mapping[int, Tensor]) -> None:
        """Write the files of the job."""
        (folder / JOB_FILE).write_text(self.model_dump_json(), encoding="utf-8")
        if state is not None:
            (folder / STATE_FILE).write_bytes(state)
        for number in self.record.anchor_rounds:
            anchors[number].numpy().tofile(_anchor_path(folder, number))


class JobResult(BaseModel):
    """The end of a job: a repetition, why record and state do not fit together, or why the work cannot be repeated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repetition: Repetition | None = None
    malformed: str = ""
    obstacle: str = ""


def read_state(folder: Path) -> bytearray | None:
    path = folder / STATE_FILE
    return bytearray(path.read_bytes()) if path.exists() else None


def read_anchors(folder: Path, record: WorkRecord) -> dict[int, Tensor]:
    return {
        number: torch.frombuffer(bytearray(_anchor_path(folder, number).read_bytes()), dtype=torch.float32)
        for number in record.anchor_rounds
    }


def _anchor_path(folder: Path, number: int) -> Path:
    return folder / f"anchor-{number}"
