"""The cut of a model into pipeline stages, between blocks.

A stage is a model of its own: its blocks, its flat vector, its shape table. The first stage has the embedding, the last
one the final norm and the output matrix. The flat vector of the whole model is those of the stages one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protocol.errors import ManifestError
from protocol.manifest.run import Manifest
from protocol.pipeline.stages.stage import StageManifest


@dataclass(frozen=True)
class Cut:
    """One stage of a model, by its number; a model with a single stage is whole."""

    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.stages:
            raise ValueError(f"there is no stage {self.stage} of {self.stages}")

    @property
    def has_embedding(self) -> bool:
        """Return whether the stage takes token ids."""
        return self.stage == 0

    @property
    def has_head(self) -> bool:
        """Return whether the stage returns logits or the loss."""
        return self.stage == self.stages - 1


WHOLE: Final = Cut()


def cut_of(manifest: Manifest) -> Cut:
    """Return the part of the model that a manifest is for."""
    return Cut(manifest.stage, manifest.pipeline.stages) if isinstance(manifest, StageManifest) else WHOLE


def all_cuts(stages: int) -> tuple[Cut, ...]:
    """Return the cuts of a model with `stages` stages, in order."""
    return tuple(Cut(stage, stages) for stage in range(stages))


def require_stages(stages: int, layers: int, tied: bool) -> None:
    """Raise ManifestError, one line that names the key to change, unless a model can have this many stages."""
    if stages > layers:
        reason = f"{stages} stages need as many layers, and model.layers is {layers}"
        raise ManifestError(f"pipeline.stages: {reason}; write at most {layers}", ("pipeline", "stages"))
    if stages > 1 and tied:
        reason = "the embedding is in the first stage and the output layer in the last, so they cannot share weights"
        raise ManifestError(f"model.tied: {reason}; write tied = false", ("model", "tied"))


def deal_blocks(work: Sequence[float], stages: int) -> tuple[range, ...]:
    """Return the block numbers of each stage, so that the slowest stage is as fast as possible.

    Args:
        work: of embedding, layers and head; at least `stages` layers, all of which cost the same.
        stages: number of stages.
    """
    layers, layer = len(work) - 2, work[1]
    counts, loads = [1] * stages, [layer] * stages
    loads[0] += work[0]
    loads[-1] += work[-1]
    for _ in range(layers - stages):
        lightest = loads.index(min(loads))
        counts[lightest] += 1
        loads[lightest] += layer
    ends = [1 + sum(counts[: stage + 1]) for stage in range(stages)]
    starts = [0, *ends[:-1]]
    ends[-1] += 1
    return tuple(range(start, end) for start, end in zip(starts, ends, strict=True))
