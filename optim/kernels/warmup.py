"""Compile and load kernels before a round or an inner step needs them, by rounds and steps of few values.

    python -m optim.kernels.warmup

compiles the kernels of all recipes and codecs for this machine.
"""

import dataclasses
from collections.abc import Iterator
from typing import Final, get_args, get_type_hints

import numpy as np
import torch

from optim.codecs.base import Codec
from optim.compose import CODECS, compose, with_small_memory
from optim.exchange import Aggregator, ContributionEncoder
from optim.inner.base import InnerStep
from optim.inner.eight_bit import EightBitAdamW
from optim.layout import Layout
from optim.method import Method
from optim.recipes import RECIPES
from optim.round_plan import RoundPlanner

MATRIX_SHAPE: Final = (40, 130)  # more than a block, and not a whole number of them
MEMBER_WEIGHTS: Final = (1.0, 0.9, 0.8)


def warm_up(method: Method) -> None:
    """Run a round of this method for each change of its options, with two members and one matrix a fragment.

    An inner optimizer that has a kernel also makes a step.
    """
    shapes = (*(MATRIX_SHAPE,) * method.schedule.fragments, (3,))
    schedule = method.schedule
    experts = (*(-1,) * (len(shapes) - 1), 0) if schedule.experts_every > 1 or schedule.experts == "trained" else ()
    layout = Layout(shapes, experts=experts)
    planner = RoundPlanner(method, layout, 1)
    for round_number in method.breakpoints:
        _run_round(planner, round_number)
    if isinstance(method.inner, EightBitAdamW):
        _step_inner(method.inner, layout)


def _run_round(planner: RoundPlanner, round_number: int) -> None:
    plan, encoder, aggregator = planner.plan(round_number), ContributionEncoder(planner), Aggregator(planner)
    method, shape = plan.method, (len(MEMBER_WEIGHTS), planner.signal_numel)
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    residual = torch.zeros(planner.signal_numel)
    payloads = [encoder.encode(round_number, torch.from_numpy(row), residual)[0] for row in values]
    encoder.restore_to_residual(round_number, payloads[:1], residual, 0.5)
    if method.topology.reduces_parts:
        payloads = [aggregator.reduce_part(round_number, 0, payloads, MEMBER_WEIGHTS).payload]
    slots = {name: torch.zeros(method.slot_numel(name, planner.numel)) for name in method.slots}
    for forms in (payloads, [aggregator.decode_part(round_number, payload, 0) for payload in payloads]):
        merged = aggregator.merge(round_number, forms, MEMBER_WEIGHTS[: len(payloads)], slots).vector
        merged.to_dense()
        planner.apply_outer_step(plan, torch.zeros(planner.numel), slots, merged, 1.0, MEMBER_WEIGHTS)


def _step_inner(inner: EightBitAdamW, layout: Layout) -> None:
    moments = {
        name: torch.zeros(inner.vector_numel(name, layout), dtype=inner.vector_dtype(name)) for name in inner.vectors
    }
    step = InnerStep(0, 0.1, 0.9, 0.95, 0.0, layout.matrix_spans)
    inner.step(torch.zeros(layout.numel), torch.ones(layout.numel), moments, step)


def all_methods() -> Iterator[Method]:
    """Yield all recipes, one with little memory, and each codec with each of its options that is a choice of words."""
    yield from map(compose, RECIPES)
    yield with_small_memory(compose("frugal"))
    yield compose("edit", {"aggregate": {"kind": "filtered"}})
    for name, kind in CODECS.items():
        feedback = {"kind": "error" if kind.is_contractive else "none"}
        for option in _choices(kind):
            yield compose("diloco", {"codec": {"kind": name, **option}, "feedback": feedback})


def _choices(kind: type[Codec]) -> Iterator[dict[str, str]]:
    yield {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        for choice in get_args(get_type_hints(kind)[field.name]):
            if isinstance(choice, str):
                yield {field.name: choice}


if __name__ == "__main__":
    for each in all_methods():
        warm_up(each)
