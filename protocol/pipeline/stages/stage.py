"""The identity of a stage: a run within the run.

Stage s of S has an id of its own, so it has its own chain, roster, outer state, vote log and checkpoints, and a message
of one stage is invalid at another. Peers, addresses and the manifest are the run's.
"""

import hashlib
from typing import Self

from pydantic import Field

from protocol.manifest.run import Manifest, RunId

DOMAIN = b"murmur stage 1\0"


def stage_run_id(run_id: RunId, stages: int, stage: int) -> RunId:
    """Return the run id of a stage; the only stage of a run that is not cut has the run's own.

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
    """The manifest of a run as one stage of it sees it: the same settings, and the id of the stage."""

    stage: int = Field(ge=0, exclude=True)

    @classmethod
    def of(cls, manifest: Manifest, stage: int) -> Self:
        """Return the manifest of one stage of a run."""
        return cls(stage=stage, **{name: getattr(manifest, name) for name in Manifest.model_fields})

    @property
    def run_id(self) -> RunId:
        """Return the id of the stage."""
        return stage_run_id(self.whole_run_id, self.pipeline.stages, self.stage)


def stage_of(manifest: Manifest) -> int | None:
    """Return the stage that a manifest is for; None for the whole model."""
    return manifest.stage if isinstance(manifest, StageManifest) else None
