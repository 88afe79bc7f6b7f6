"""The identity of a stage: a run within the run.

Each stage has its own run id, and so its own chain, roster, outer state, vote log and checkpoints. A message of one
stage is invalid at another. Peers, addresses and the manifest belong to the run.
"""

import hashlib
from dataclasses import dataclass
from typing import Self

from pydantic import Field

from protocol.manifest.run import Manifest, RunId
from protocol.pipeline.messages import Direction, Input

DOMAIN = b"murmur stage 1\0"


def stage_run_id(run_id: RunId, stages: int, stage: int) -> RunId:
    """Return the run id of a stage; if there is only one stage, the id of the run.

    Raises:
        ValueError: there is no such stage.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"there is no stage {stage} of {stages}")
    if stages == 1:
        return run_id
    return hashlib.sha256(DOMAIN + f"{run_id} {stages} {stage}".encode()).hexdigest()


def stage_run_ids(run_id: RunId, stages: int) -> tuple[RunId, ...]:
    """Return the run ids of all stages, in order."""
    return tuple(stage_run_id(run_id, stages, stage) for stage in range(stages))


class StageManifest(Manifest):
    """The manifest of a run for one stage: the same settings with the id of the stage."""

    stage: int = Field(ge=0, exclude=True)

    @classmethod
    def of(cls, manifest: Manifest, stage: int) -> Self:
        """Return the manifest of one stage of a run."""
        return cls(stage=stage, **{name: getattr(manifest, name) for name in Manifest.model_fields})

    @property
    def run_id(self) -> RunId:
        return stage_run_id(self.whole_run_id, self.pipeline.stages, self.stage)


def stage_of(manifest: Manifest) -> int | None:
    """Return the stage that a manifest is for; None for the whole model."""
    return manifest.stage if isinstance(manifest, StageManifest) else None


@dataclass(frozen=True)
class StageSettings:
    """The settings of the server of a stage.

    Args:
        stage: position among `stages`.
        step_size: microbatches in an inner step.
        memory: bytes of activations that the server may hold.
        needs_tokens: each stage needs the tokens, not only the first and the last.
    """

    run: RunId
    stage: int
    stages: int
    activation_bytes: int
    token_bytes: int
    step_size: int
    memory: int
    needs_tokens: bool = False

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def input_bytes(self, direction: Direction) -> dict[Input, int]:
        """Return the sizes of the inputs that a task must have, by name."""
        sizes: dict[Input, int] = {} if self.is_first else {"activation": self.activation_bytes}
        if self.is_first or self.is_last or self.needs_tokens:
            sizes["tokens"] = self.token_bytes
        if direction == "backward" and not self.is_last:
            sizes["gradient"] = self.activation_bytes
        return sizes

    def result_bytes(self, direction: Direction) -> int:
        has_result = not self.is_last if direction == "forward" else not self.is_first
        return self.activation_bytes if has_result else 0

    def task_bytes(self, direction: Direction) -> int:
        """Return the memory that a task needs if the server has none of its inputs."""
        return sum(self.input_bytes(direction).values()) + self.result_bytes(direction)
