"""The sizes of model that `murmur init` offers, each with a pace of rounds at which volunteers are busy.

A round must train for longer than its exchange takes. How many inner steps that needs depends on size and recipe, and
finding out takes seconds and torch, so `run_sizes.json` has the results for the default manifest of each size and each
recipe, and the work of a run for `murmur plan`; `python -m node.commands.init` writes it, and a test compares it with
new predictions.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protocol.manifest.run import Manifest

if TYPE_CHECKING:
    from node.commands.plan.arithmetic import Workload

RECORDED: Final = Path(__file__).with_name("run_sizes.json")
BUSY: Final = 0.9  # share of their compute that typical volunteers should use
STEPS: Final = (12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 120, 150, 200, 250)
# Longer rounds cost loss: of 300 steps with four peers of the tiny model, frugal ends at 2.11 nats with its own 9 steps
# a round, at 2.23 with 18, and at 3.39 with 50, where peers that never exchange end at 2.31.
MOST_STRETCHED: Final = 2  # times the recipe's own steps
MAX_RECORDED_PEERS: Final = 8  # up to this number, a plan assumes the same volunteers

# Keys of [train] that change what a step does, and not how much it computes, keeps or sends.
RATE_KEYS: Final = (
    "learning_rate", "warmup_steps", "decay_steps", "schedule", "decay_share", "final_share", "weight_decay", "beta1",
    "beta2",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSize:
    """A model and the batch and learning rate that suit it; sizes in elements, `context` and batch in tokens."""

    width: int
    layers: int
    heads: int
    hidden: int
    context: int
    batch_tokens: int
    microbatch: int
    learning_rate: str

    def parameters(self, vocabulary: int = 256) -> int:
        """Return the parameters of a decoder of kind llama: embedding, attention, SwiGLU and norms."""
        layer = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return vocabulary * self.width + self.layers * layer + self.width


SIZES: Final[Mapping[str, ModelSize]] = {
    "tiny": ModelSize(128, 4, 4, 344, 128, 2048, 16, "3e-3"),
    "small": ModelSize(256, 6, 8, 688, 256, 8192, 16, "2e-3"),
    "medium": ModelSize(512, 12, 8, 1376, 512, 32768, 8, "1e-3"),
    "large": ModelSize(768, 12, 12, 2048, 1024, 65536, 4, "6e-4"),
}


@dataclass(frozen=True)
class SizeFacts:
    """The needs of a run, and its pace.

    Attributes:
        parameters: of the model.
        inner_steps: of a round, where the recipe's own are too few; None means the recipe's own.
        ahead: steps that a peer trains on meanwhile, where the recipe's peers do so for a whole round; else None.
        busy: share of their compute that typical volunteers use.
        cpu: bytes of memory that a peer needs on a CPU.
        cuda: bytes that it needs of a card.
    """

    parameters: int
    inner_steps: int | None
    ahead: int | None
    busy: float
    cpu: int
    cuda: int

    def schedule(self) -> dict[str, int]:
        """Return the options of `method.schedule` that differ from the recipe's."""
        if self.inner_steps is None:
            return {}
        return {"inner_steps": self.inner_steps} | ({} if self.ahead is None else {"ahead": self.ahead})


@cache
def recorded_facts() -> Mapping[tuple[str, str], SizeFacts]:
    """Return the recorded facts by size and recipe, for byte tokens and at most MAX_RECORDED_PEERS."""
    return {(row["size"], row["recipe"]): SizeFacts(**row["facts"]) for row in _read_rows()}


@cache
def _read_rows() -> list[dict[str, Any]]:
    return list(json.loads(RECORDED.read_text()))


def recorded_workload(manifest: Manifest) -> "Workload | None":
    """Return the recorded work of a manifest that `murmur init` wrote; None for one with another model or method."""
    from node.commands.plan.arithmetic import StageCost, Workload
    from optim.topologies import TOPOLOGIES

    key = work_key(manifest)
    for row in _read_rows():
        if row["key"] == key:
            values = dict(row["work"])
            kind, options = values.pop("topology")
            stages = tuple(StageCost(**stage) for stage in values.pop("stages"))
            return Workload(manifest, TOPOLOGIES[kind](**options), stages=stages, **values)
    return None


def work_values(work: "Workload") -> dict[str, Any]:
    """Return the work of a run, without its manifest, as JSON values."""
    values = {name: value for name, value in vars(work).items() if name != "manifest"}
    return values | {
        "topology": [work.topology.kind, asdict(work.topology)],
        "stages": [asdict(stage) for stage in work.stages],
    }


def work_key(manifest: Manifest) -> str:
    """Return a hash of all that the work of a run depends on.

    That is the whole manifest but for what is listed here, so that a key of a manifest that is new counts at first.
    """
    values = json.loads(manifest.canonical())
    for section in ("run", "data", "target", "admission", "membership", "checkpoint"):
        del values[section]
    for key in RATE_KEYS:
        del values["train"][key]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def find_facts(manifest: Manifest) -> SizeFacts:
    """Compute the facts of a run whose schedule is the recipe's own.

    Raises ManifestError if the recipe is unknown or does not fit the model.
    """
    from node.commands.capacity import estimate_needs, workload_of  # loads torch
    from node.commands.plan.arithmetic import predict
    from node.commands.plan.peers import typical_peers
    from node.from_manifest import build_method
    from node.model import shape_table
    from node.model.memory_estimate import fixed_bytes, microbatch_bytes

    schedule, parameters = build_method(manifest).schedule, shape_table(manifest.model).numel
    kinds = typical_peers(manifest, parameters)
    found: dict[tuple[int | None, int | None], float] = {}
    for options in _schedules(manifest, schedule.inner_steps, schedule.ahead):
        found[options] = predict(workload_of(_with_schedule(manifest, options)), kinds).fraction
        if found[options] >= BUSY:
            break
    best = max(found, key=lambda options: found[options])
    if found[best] < BUSY:  # as many messages as the recipe wants: fewer would not do
        best = next(iter(found))
    return SizeFacts(
        parameters,
        *best,
        round(found[best], 3),
        estimate_needs(manifest, "cpu").memory,
        fixed_bytes(manifest, "cuda") + microbatch_bytes(manifest, 1, "cuda"),
    )


def _schedules(manifest: Manifest, steps: int, ahead: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield the recipe's own pace and slower ones; a recipe that sends every gradient, or changes its pace, has one."""
    from node.from_manifest import build_method

    yield None, None
    method = build_method(manifest)
    if steps == 1 or len(method.breakpoints) > 1 or method.schedule.delay or method.schedule.seconds:
        return
    for more in STEPS:
        if steps < more <= MOST_STRETCHED * steps:
            yield more, more if ahead == steps else None


def _with_schedule(manifest: Manifest, options: tuple[int | None, int | None]) -> Manifest:
    table = {name: value for name, value in zip(("inner_steps", "ahead"), options, strict=True) if value is not None}
    return manifest.model_copy(update={"method": manifest.method.model_copy(update={"schedule": table})})
