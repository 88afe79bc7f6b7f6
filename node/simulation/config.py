"""What is simulated: a manifest, and the machines and links it runs on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from node.model import LanguageModel, build_compiled_model, build_model, initial_weights
from node.simulation.adversary import Adversaries
from protocol.errors import UsageError
from protocol.manifest import DataSection, Manifest, MethodSection, ModelSection, RoundSection, RunSection, TrainSection

DEFAULT_MODEL = ModelSection(width=64, layers=2, heads=4, hidden=172, context=64)


@dataclass(frozen=True)
class SimulationConfig:
    """`steps`: inner steps of each peer, where all are equally fast. Per peer: `speeds` in inner steps a second,
    `bandwidths` in bytes a second; `latency` in seconds. `churn`: the share of peers that die in each round."""

    manifest: Manifest
    base: Path
    peers: int
    steps: int
    speeds: tuple[float, ...]
    bandwidths: tuple[float, ...]
    latency: float
    churn: float = 0.0
    adversaries: Adversaries | None = None
    initial: Tensor | None = None  # the weights that training starts from; None: those of the seed
    compiled: bool = False  # bf16 products, and compiled: worth its start in long runs

    def build_model(self) -> LanguageModel:
        """One that trains or is examined; its weights are zero yet."""
        return build_compiled_model(self.manifest.model) if self.compiled else build_model(self.manifest.model)

    def start_weights(self) -> Tensor:
        """Flat fp32."""
        if self.initial is not None:
            return self.initial.clone()
        return initial_weights(self.manifest.model, self.manifest.run.seed)

    @property
    def target_tokens(self) -> int:
        """Of all peers together, when the run ends."""
        return self.steps * self.peers * self.manifest.train.batch_tokens


def default_manifest(steps: int) -> Manifest:
    """A model that takes some milliseconds a step, on text that every machine has."""
    return Manifest(
        run=RunSection(name="simulation"),
        model=DEFAULT_MODEL,
        data=DataSection(source="python-stdlib"),
        train=TrainSection(batch_tokens=512, learning_rate=3e-3, warmup_steps=20, decay_steps=steps),
        method=MethodSection(recipe="diloco"),
        round=RoundSection(grace=5.0, leader_timeout=3.0, exchange_timeout=60.0),
    )


def expand_per_peer(values: Sequence[float], peers: int, option: str) -> tuple[float, ...]:
    """One value for all, or one for each."""
    if len(values) not in (1, peers) or not all(math.isfinite(value) and value > 0 for value in values):
        raise UsageError(f"{option} takes one positive number, or one for each of the {peers} peers")
    return tuple(values) * (peers // len(values))
