"""The checks of one's own components pass for every component of ours, and name what a broken one breaks."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic.dataclasses import dataclass

from examples.own_method import Ternary
from murmuration import check_component
from optim.aggregation.base import WeightedPayload
from optim.aggregation.mean import Mean
from optim.codecs.base import Codec, Payload
from optim.compose import BASES, REGISTRY
from optim.inner.adamw import AdamW
from optim.inner.base import InnerStep
from optim.kernels.vectors import Floats, Vector
from optim.layout import Layout, Span
from optim.options import STRICT
from optim.outer import OuterStep, Sgd, Slots
from optim.schedules.exchange_schedule import EverySteps

OURS = [kind for part in BASES for kind in REGISTRY[part].values()]
own = dataclass(frozen=True, kw_only=True, config=STRICT)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_components_of_ours_break_no_promise(kind: type[Any]) -> None:
    assert check_component(kind) == []


@pytest.mark.parametrize("threshold", [0.0, 0.7, 4.0])
def test_codec_of_the_example_breaks_no_promise(threshold: float) -> None:
    assert check_component(Ternary(threshold=threshold)) == []


@own
class Echo(Ternary):
    kind: ClassVar[str] = "echo"
    number: ClassVar[int] = 201


class Longer(Echo):
    def max_bytes(self, numel: int) -> int:
        return 6


class Forgetful(Echo):
    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        return super().encode_array(values, False)


class Noisy(Echo):
    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        payload = bytearray(super().encode_array(values, subtract))
        payload[-1] ^= np.random.default_rng().integers(1, 2**6)
        return payload


class Careless(Echo):
    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        return super().encode_array(np.nan_to_num(values, posinf=0, neginf=0) % 2**40, subtract)


class Trusting(Echo):
    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        return super().decode_vector(bytes(payload[: self.max_bytes(numel)]).ljust(self.max_bytes(numel), b"\0"), numel)


class Crashing(Echo):
    def max_bytes(self, numel: int) -> int:
        return super().max_bytes(numel) + 1

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        payload = bytes(super().encode_array(values, subtract))
        return payload[:6] + b"\0" + payload[6:]

    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        vector = super().decode_vector(bytes(payload[:6]) + bytes(payload[7:]), numel)
        return (vector,)[payload[6]]  # an index of the sender's


class Greedy(Echo):
    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        np.zeros(10_000_000, np.uint8)
        return super().decode_vector(payload, numel)


class Growing(Echo):
    @staticmethod
    def _values(codes: Any, scale: np.float32) -> Floats:
        values: Floats = np.array([0, 9 * scale, -9 * scale], np.float32)[codes]
        return values


@own
class Slabwise(Sgd):
    kind: ClassVar[str] = "slabwise"

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        anchor -= delta / delta.norm()


@own
class RandomWalk(Sgd):
    kind: ClassVar[str] = "random-walk"

    def apply(self, anchor: torch.Tensor, slots: Slots, delta: torch.Tensor, outer_step: OuterStep) -> None:
        anchor += torch.randn_like(anchor)


@own
class LayerNorms(AdamW):
    kind: ClassVar[str] = "layer-norms"

    def step(
        self, weights: torch.Tensor, gradient: torch.Tensor, vectors: Mapping[str, torch.Tensor], step: InnerStep
    ) -> None:
        super().step(weights, gradient / gradient.norm(), vectors, step)


@own
class Doubling(Mean):
    kind: ClassVar[str] = "doubling"

    def combine(self, payloads: Any, state: Floats | None = None) -> Floats:
        combined = super().combine(payloads, state)
        return combined + combined

    def screen(self, payloads: Any, usual_norm: float = 0.0, state: Floats | None = None) -> Any:
        verdict = super().screen(payloads, usual_norm, state)
        return dataclasses.replace(verdict, payloads=tuple(payloads))


@own
class CountsAbsent(Mean):
    kind: ClassVar[str] = "counts-absent"

    def combine(self, payloads: Any, state: Floats | None = None) -> Floats:
        weighted = [WeightedPayload(each.codec, each.payload, each.numel, each.weight + 1) for each in payloads]
        return super().combine(weighted, state)


@own
class Halves(EverySteps):
    kind: ClassVar[str] = "halves"

    def spans(self, round_number: int, layout: Layout) -> tuple[Span, ...]:
        return ((0, layout.numel // 2),)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Longer, "above max_bytes"),
        (Forgetful, "must leave exactly the values less what the receiver decodes"),
        (Noisy, "the same bits"),
        (Careless, "for a value of nan"),
        (Trusting, "cut, lengthened or of another codec"),
        (Crashing, "raises IndexError for altered bytes"),
        (Greedy, "check sizes before you allocate"),
        (Growing, "set is_contractive = False"),
        (Slabwise, "slabs give other values"),
        (RandomWalk, "the same bits"),
        (LayerNorms, "slabs give other values"),
        (Doubling, "must not become a longer one"),
        (Doubling, "far above the usual one"),
        (CountsAbsent, "weight zero must change nothing"),
        (CountsAbsent, "if no payload has a weight"),
        (Halves, "sent once in a period"),
    ],
)
def test_broken_promise_is_named(kind: type[Any], words: str) -> None:
    assert any(words in line for line in check_component(kind)), check_component(kind)


def test_declaration_that_a_method_cannot_use_is_named() -> None:
    class Plain(Codec):
        kind: ClassVar[str] = "plain"
        number: ClassVar[int] = 210

    wrong = dataclasses.make_dataclass("Wrong", [], bases=(Echo,), frozen=True, namespace={"number": 3})
    assert "none of InnerUpdateRule" in check_component(object)[0]
    assert "decorate it with @dataclass(frozen=True" in check_component(Plain)[0]
    assert "one from 128 to 255" in check_component(wrong)[0]
