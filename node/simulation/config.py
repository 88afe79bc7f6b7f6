"""The setting of a simulation: a manifest, and the machines and links of its peers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from node.model import WHOLE, Cut, LanguageModel, build_compiled_model, build_model, stage_slice
from node.model.shapes import require_stages
from node.model.weight_files import read_frozen, start_weights
from node.simulation.adversary import Adversaries
from protocol.errors import MissingFileError, UsageError
from protocol.manifest.model import ModelSection
from protocol.manifest.reading import manifest_of_values
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection, MethodSection, RoundSection, RunSection, TrainSection

REACTION_SECONDS = 0.01  # of a daemon
DEFAULT_MODEL = ModelSection(width=64, layers=2, heads=4, hidden=172, context=64)


@dataclass(frozen=True)
class SimulationConfig:
    """The setting of one simulated run.

    Attributes:
        steps: inner steps per peer if all are equally fast.
        speeds: inner steps per second, by peer.
        bandwidths: bytes per second, by peer.
        latency: seconds, one way.
        churn: fraction of the peers that die in each round.
        initial: weights at the start; `None` means those of the seed.
        unequal: each peer reads a part of the text of its own; a text that cannot be cut is shared.
        compiled: compile the model with bf16 products, which pays off in long runs.
        cut: the stage of the model that the peers train.
        reactions: seconds that the daemon of each peer takes to handle what comes in; empty: 10 ms each.
        device: where the models of all peers are.
    """

    manifest: Manifest
    base: Path
    peers: int
    steps: int
    speeds: tuple[float, ...]
    bandwidths: tuple[float, ...]
    latency: float
    churn: float = 0.0
    adversaries: Adversaries | None = None
    initial: Tensor | None = None
    compiled: bool = False
    unequal: bool = False
    cut: Cut = WHOLE
    reactions: tuple[float, ...] = ()
    device: str = "cpu"

    def build_model(self) -> LanguageModel:
        """Build a model for training or evaluation, with zero weights."""
        model, frozen = self.manifest.model, read_frozen(self.manifest.model, self.base)
        if not self.compiled:
            return build_model(model, self.device, cut=self.cut, frozen=frozen)
        compiled = build_compiled_model(model, self.device)
        if frozen is not None:
            compiled.hold_frozen(frozen)
        return compiled

    def reaction_seconds(self, slot: int) -> float:
        """Return the virtual time in which a peer gathers what comes in before it handles it."""
        return self.reactions[slot] if self.reactions else REACTION_SECONDS

    def start_weights(self) -> Tensor:
        """Return the weights at the start, flat fp32."""
        if self.initial is not None:
            return self.initial[stage_slice(self.manifest.model, self.cut)].clone()
        weights = start_weights(self.manifest, self.base, self.cut)
        if weights is None:
            raise MissingFileError("the simulator needs the first weights; name their folder in model.from")
        return weights

    @property
    def target_tokens(self) -> int:
        """Return the tokens of all peers together at the end of the run."""
        return self.steps * self.peers * self.manifest.train.batch_tokens


def default_manifest(steps: int, stages: int = 1) -> Manifest:
    """Return a run of a model with a few milliseconds per step, on text that every machine has.

    A model that is to be cut into `stages` is untied and has at least as many layers.
    """
    model = DEFAULT_MODEL
    if stages > 1:
        model = model.model_copy(update={"tied": False, "layers": max(stages, model.layers)})
    return Manifest(
        run=RunSection(name="simulation"),
        model=model,
        data=DataSection(source="python-stdlib"),
        train=TrainSection(batch_tokens=512, learning_rate=3e-3, warmup_steps=20, decay_steps=steps),
        method=MethodSection(recipe="diloco"),
        round=RoundSection(grace=5.0, leader_timeout=3.0, exchange_timeout=60.0),
    )


def with_stages(manifest: Manifest, stages: int) -> Manifest:
    """Return the manifest with this many stages; one without a pipeline gets four microbatches a step, or more.

    Raises ManifestError if the model cannot be cut so.
    """
    if stages == manifest.pipeline.stages:
        return manifest
    require_stages(stages, manifest.model.layers, manifest.model.tied)
    values = manifest.model_dump(mode="json")
    values["pipeline"] |= {"stages": stages, "speeds": []}
    sequences = manifest.train.batch_tokens // manifest.model.context
    if not manifest.pipeline.is_cut:
        values["pipeline"]["microbatch"] = 1 if sequences % 4 else sequences // 4
    return manifest_of_values(values, "--stages")


def expand_per_peer(values: Sequence[float], peers: int, option: str) -> tuple[float, ...]:
    """Return one value per peer, from one value for all or one for each. Raises UsageError."""
    if len(values) not in (1, peers) or not all(math.isfinite(value) and value > 0 for value in values):
        raise UsageError(f"{option} takes one positive number, or one for each of the {peers} peers")
    return tuple(values) * (peers // len(values))
