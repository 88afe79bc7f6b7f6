"""One model's layout, and peers that hold a method's shared state, for tests of whole methods."""

from collections.abc import Sequence

import torch

from optim.codecs.codec import Payload
from optim.exchange import Merger, Sender
from optim.layout import Layout
from optim.method import MEMORY, Method
from optim.parts import Scalar
from optim.program import Program
from optim.recipes import compose
from optim.vectors import PlainVector, Vector

PARTS = 3
EMBEDDING, LAYER, LAYERS, NORM = (60, 50), ((20, 30), (50,)), 8, (800,)
LAYOUT = Layout(
    (EMBEDDING, *(shape for _ in range(LAYERS) for shape in LAYER), NORM),
    (0, *(1 + layer for layer in range(LAYERS) for _ in LAYER), 1 + LAYERS),
)
NUMEL = LAYOUT.numel  # 9000
Tables = dict[str, dict[str, Scalar]]
LOSSLESS: Tables = {"codec": {"kind": "none"}}
NO_PROGRESS: Tables = {"adoption": {"unsent": 0.0}}  # for signals of which what is left is none


def program_of(recipe: str | Method, overrides: Tables | None = None, parts: int = PARTS) -> Program:
    method = compose(recipe, overrides or {}) if isinstance(recipe, str) else recipe
    return Program(method, LAYOUT, parts)


def plain(values: torch.Tensor) -> PlainVector:
    return PlainVector(values.numpy())


def draw(seed: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def decoded(program: Program, number: int, payloads: Sequence[Payload]) -> torch.Tensor:
    """A message as its receivers read it: as long as what is measured, zero where the round sends nothing."""
    plan, whole = program.plan(number), torch.zeros(program.message_numel)
    parts = [
        codec.decode(payload, stop - start)
        for codec, payload, (start, stop) in zip(plan.codecs, payloads, plan.bounds, strict=True)
    ]
    plan.scatter(torch.cat(parts), whole)
    return whole


def sent(program: Program, number: int) -> torch.Tensor:
    """1 where that round sends something, else 0."""
    mask = torch.zeros(program.message_numel)
    for start, stop in program.plan(number).spans:
        mask[start:stop] += 1
    return mask


class Replica:
    """One peer's share of a method: anchor, outer state, residual."""

    def __init__(self, program: Program) -> None:
        self.program, method = program, program.method
        self.sender = Sender(program)
        self.merger = Merger(program)
        self.anchor = torch.zeros(program.numel)
        self.residual = torch.zeros(program.message_numel)
        self.slots = {name: torch.zeros(method.size_of(name, program.numel)) for name in method.slots}

    def message(self, number: int, seed: int) -> list[Payload]:
        return self.sender.message(number, draw(seed, self.program.message_numel), self.residual)

    def merged(self, number: int, messages: Sequence[Sequence[Payload]], weights: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(self._merged(number, messages, weights).dense())

    def _merged(self, number: int, messages: Sequence[Sequence[Payload]], weights: Sequence[float]) -> Vector:
        """As a swarm would, whoever reduces which part."""
        plan = self.program.plan(number)
        if plan.method.topology.kind != "butterfly":
            return self.merger.merge(number, [parts[0] for parts in messages], weights, self.slots.get(MEMORY))
        reduced = [
            self.merger.reduce_part(number, part, [parts[part] for parts in messages], weights)
            for part in range(len(plan.bounds))
        ]
        return self.merger.merge(number, reduced, ())

    def apply(self, number: int, messages: Sequence[Sequence[Payload]], weights: Sequence[float]) -> torch.Tensor:
        merged = self._merged(number, messages, weights)
        plan = self.program.plan(number)
        self.anchor, self.slots = self.program.moved(plan, self.anchor, self.slots, merged, 1.0, weights)
        return torch.from_numpy(merged.dense())

    @property
    def state(self) -> list[torch.Tensor]:
        return [self.anchor, *(self.slots[name] for name in sorted(self.slots))]
