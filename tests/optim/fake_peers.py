"""The layout of one model, and peers that hold a method's shared state, for tests of whole methods."""

from collections.abc import Mapping, Sequence

import torch

from optim.codecs.base import Payload
from optim.compose import compose
from optim.exchange import Aggregator, ContributionEncoder, Merged
from optim.kernels.vectors import ArrayVector
from optim.layout import Layout
from optim.method import USUAL_NORM, Method
from optim.options import OptionValue, Scalar
from optim.round_plan import RoundPlanner

PART_COUNT = 3
EMBEDDING, LAYER, LAYERS, NORM = (60, 50), ((20, 30), (50,)), 8, (800,)
LAYOUT = Layout(
    (EMBEDDING, *(shape for _ in range(LAYERS) for shape in LAYER), NORM),
    (0, *(1 + layer for layer in range(LAYERS) for _ in LAYER), 1 + LAYERS),
)
NUMEL = LAYOUT.numel  # 9000
Tables = dict[str, Mapping[str, OptionValue]]


def constant(value: Scalar, rounds: int) -> dict[str, Scalar]:
    """Return a phase that does not change."""
    return {"value": value, "rounds": rounds}


def curve(start: float, end: float, rounds: int, form: str = "linear") -> dict[str, Scalar]:
    return {"start": start, "end": end, "rounds": rounds, "curve": form}


LOSSLESS: Tables = {"codec": {"kind": "none"}}
NO_PROGRESS: Tables = {"adoption": {"unsent": 0.0}}  # for signals whose residual is not progress


def make_planner(recipe: str | Method, overrides: Tables | None = None, part_count: int = PART_COUNT) -> RoundPlanner:
    method = compose(recipe, overrides or {}) if isinstance(recipe, str) else recipe
    return RoundPlanner(method, LAYOUT, part_count)


def as_vector(values: torch.Tensor) -> ArrayVector:
    return ArrayVector(values.numpy())


def random_values(seed: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def decode_contribution(planner: RoundPlanner, round_number: int, payloads: Sequence[Payload]) -> torch.Tensor:
    """Return a contribution as its receivers read it: as long as the signal, zero where the round sends nothing."""
    plan, whole = planner.plan(round_number), torch.zeros(planner.signal_numel)
    parts = [
        codec.decode(payload, stop - start)
        for codec, payload, (start, stop) in zip(plan.codecs, payloads, plan.part_spans, strict=True)
    ]
    plan.scatter(torch.cat(parts), whole)
    return whole


def sent_mask(planner: RoundPlanner, round_number: int) -> torch.Tensor:
    """Return 1 for each value that the round sends, else 0."""
    mask = torch.zeros(planner.signal_numel)
    for start, stop in planner.plan(round_number).spans:
        mask[start:stop] += 1
    return mask


def encode(
    encoder: ContributionEncoder,
    number: int,
    delta: torch.Tensor,
    residual: torch.Tensor,
    trained: Sequence[bool] = (),
) -> list[Payload]:
    """Encode a contribution and store what is left in the residual."""
    left = delta.clone()
    payloads = encoder.encode(number, left, residual, trained)
    encoder.keep_remainder(number, left, residual)
    return payloads


class FakePeer:
    """A peer's state of a method: anchor, slots, residual."""

    def __init__(self, planner: RoundPlanner) -> None:
        self.planner, method = planner, planner.method
        self.encoder = ContributionEncoder(planner)
        self.aggregator = Aggregator(planner)
        self.anchor = torch.zeros(planner.numel)
        self.residual = torch.zeros(planner.signal_numel)
        self.slots = {name: torch.zeros(method.slot_numel(name, planner.numel)) for name in method.slots}

    def encode(self, number: int, seed: int) -> list[Payload]:
        return encode(self.encoder, number, random_values(seed, self.planner.signal_numel), self.residual)

    def aggregate(
        self, number: int, contributions: Sequence[Sequence[Payload]], weights: Sequence[float]
    ) -> torch.Tensor:
        return torch.from_numpy(self._aggregate(number, contributions, weights).vector.to_dense())

    def _aggregate(self, number: int, contributions: Sequence[Sequence[Payload]], weights: Sequence[float]) -> Merged:
        """Aggregate as a swarm would, whichever peers reduce the parts."""
        plan = self.planner.plan(number)
        if plan.method.topology.kind != "butterfly":
            return self.aggregator.merge(number, [parts[0] for parts in contributions], weights, self.slots)
        reduced = [
            self.aggregator.reduce_part(number, part, [parts[part] for parts in contributions], weights).payload
            for part in range(len(plan.part_spans))
        ]
        return self.aggregator.merge(number, reduced, (), self.slots)

    def apply(self, number: int, contributions: Sequence[Sequence[Payload]], weights: Sequence[float]) -> torch.Tensor:
        merged = self._aggregate(number, contributions, weights)
        plan = self.planner.plan(number)
        self.anchor, self.slots = self.planner.apply_outer_step(
            plan, self.anchor, self.slots, merged.vector, 1.0, weights, unsent=merged.unsent
        )
        return torch.from_numpy(merged.vector.to_dense())

    @property
    def state(self) -> list[torch.Tensor]:
        return [self.anchor, *(self.slots[name] for name in sorted(self.slots))]


def new_slots() -> dict[str, torch.Tensor]:
    """Return the small slots before the first round of a method that sends all values in each round."""
    return {USUAL_NORM: torch.zeros(1)}
