"""Check the promises that a component makes to rounds, to restarts, and against the bytes of strangers.

The tests of this repository run the same checks on every component of ours. They are meant for tests of a researcher's
own, and take seconds.
"""

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from optim.aggregation.base import AggregationRule, WeightedPayload
from optim.codecs.base import Codec
from optim.codecs.floats import Uncompressed
from optim.codecs.residual_update import ResidualUpdate
from optim.compose import BASES, SIGNALS, declaration_fault, part_of
from optim.errors import CodecError, OptimError
from optim.inner.base import InnerStep, InnerUpdateRule
from optim.layout import Layout
from optim.outer import OuterOptimizer, OuterStep
from optim.schedules.exchange_schedule import EverySteps

SIZES: Final = (1, 7, 4096, 9001)
LAYOUT: Final = Layout(((40, 50), (50,), (30, 40), (40,), (25, 30)), (0, 1, 1, 2, 2))
LARGE: Final = 300_000
MAX_PEAK: Final = 4_000_000  # bytes, for bytes that do not decode
MAX_DECODED: Final = 2.0**55
NOT_USABLE: Final = (float("nan"), float("inf"), float("-inf"), 2.0**60)
HOSTILE: Final = 300
FIRST_BYTES: Final = 12
SAME: Final = "must give the same bits for the same input"


def check_component(component: object) -> list[str]:
    """Return a line for each promise that a component breaks; an empty list if there is none.

    Args:
        component: an instance, with the options to check, or a class, which is checked with its defaults.
    """
    kind = component if isinstance(component, type) else type(component)
    part = part_of(kind)
    if part is None:
        return [f"{kind.__name__} derives from none of {', '.join(base.__name__ for base in BASES.values())}"]
    is_ours = kind.__module__.startswith("optim.")
    if not is_ours and (fault := declaration_fault(part, kind)):
        return [fault]
    checked: Any = kind() if isinstance(component, type) else component
    faults: list[str] = []
    for check in _CHECKS[part]:
        try:
            faults += check(checked)
        except Exception as error:
            name = check.__name__.removeprefix("_check_").replace("_", " ")
            faults.append(f"{name}: raises {type(error).__name__}: {' '.join(str(error).split())}")
    return list(dict.fromkeys(faults))


def _sample(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    """Return values like a pseudo-gradient's: heavy-tailed, some of them zero."""
    generator = np.random.default_rng(seed)
    values = generator.standard_t(3, numel) * generator.lognormal(0, 1, numel) * (generator.random(numel) > 0.1)
    return torch.from_numpy((values * scale).astype(np.float32))


def _check_round_trip(codec: Codec) -> Iterator[str]:
    for numel, scale in itertools.product(SIZES, (0.0, 1e-30, 1e-8, 1.0, 1e6)):
        values = _sample(numel, numel, scale)
        before = values.clone()
        codec = _bind(codec, numel)
        payload = codec.encode(values)
        if not torch.equal(values, before):
            yield "encode must not change the values"
        if payload != codec.encode(before):
            yield f"encode {SAME}"
        if len(payload) > codec.max_bytes(numel):
            yield f"a payload of {numel} values has {len(payload)} bytes, above max_bytes: {codec.max_bytes(numel)}"
        decoded = codec.decode(payload, numel)
        if decoded.shape != values.shape or decoded.dtype != torch.float32 or not torch.isfinite(decoded).all():
            yield "decode must return as many finite fp32 values as were encoded"
        elif codec.is_contractive and float((values - decoded).norm()) > float(values.norm()) * (1 + 1e-5):
            yield "the error is larger than the values; set is_contractive = False, or error feedback would diverge"


def _check_subtraction(codec: Codec) -> Iterator[str]:
    for numel in SIZES:
        codec, values, rest = _bind(codec, numel), _sample(numel, 1), _sample(numel, 1)
        payload = codec.encode_and_subtract(rest)
        if payload != codec.encode(values):
            yield "encode and encode_and_subtract must make the same payload"
        if not torch.equal(rest, values - codec.decode(payload, numel)):
            yield "encode_and_subtract must leave exactly the values less what the receiver decodes"
        left, new = _sample(numel, 2), _sample(numel, 3)
        expected = left * 0.8 + new
        if codec.encode_updated(ResidualUpdate(0.8, left.numpy()), new) != codec.encode_and_subtract(expected):
            yield "encode_updated must equal an update followed by encode_and_subtract"


def _check_refusal_of_values(codec: Codec) -> Iterator[str]:
    codec = _bind(codec, 5000)
    for bad, place in itertools.product(NOT_USABLE, (0, 4095, 4999)):
        values = _sample(5000, 2)
        values[place] = bad
        if not _refuses(lambda values=values: codec.encode(values)):  # type: ignore[misc]
            yield f"encode must raise CodecError for a value of {bad}"


def _check_refusal_of_payloads(codec: Codec) -> Iterator[str]:
    codec = _bind(codec, 5000)
    payload = bytes(codec.encode(_sample(5000, 3)))
    wrong = [payload[:cut] for cut in range(0, len(payload), max(1, len(payload) // 97))]
    wrong += [payload + b"\0", payload + payload, b"\xff" * len(payload), b"\0" * len(payload)]
    if not all(_refuses(lambda data=data: codec.decode_vector(data, 5000)) for data in wrong):  # type: ignore[misc]
        yield "decode_vector must raise CodecError for a payload that is cut, lengthened or of another codec"
    others = [(_bind(codec, numel), numel) for numel in (1, 4096, 9000)]
    if not all(_refuses(lambda one=one: one[0].decode_vector(payload, one[1])) for one in others):  # type: ignore[misc]
        yield "decode_vector must raise CodecError for a payload of another number of values"


def _check_hostile_payloads(codec: Codec) -> Iterator[str]:
    codec = _bind(codec, 1000)
    payload, generator = bytes(codec.encode(_sample(1000, 4))), np.random.default_rng(0)
    for number in range(HOSTILE):
        hostile = bytearray(payload)
        end = len(payload) if number % 2 else min(len(payload), FIRST_BYTES)  # where scales and counts are
        for place in generator.integers(0, end, 1 + number % 8):
            hostile[place] = int(generator.integers(256))
        try:
            decoded = codec.decode(bytes(hostile), 1000)
        except CodecError:
            continue
        except Exception as error:
            yield f"decode_vector raises {type(error).__name__} for altered bytes instead of CodecError: {error}"
            return
        if not torch.isfinite(decoded).all() or decoded.abs().max() >= MAX_DECODED:
            yield "altered bytes decode to values that are not finite, or above 2^55"
            return


def _check_allocation(codec: Codec) -> Iterator[str]:
    codec = _bind(codec, 1000)
    header, generator = bytes(codec.encode(_sample(1000, 5))[:2]), np.random.default_rng(0)
    tracemalloc.start()
    try:
        for _ in range(100):
            _refuses(lambda: codec.decode_vector(header + generator.bytes(600), 1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > MAX_PEAK:
        yield f"600 bytes of noise made it allocate {peak:,} bytes; check sizes before you allocate"


def _check_threads(codec: Codec) -> Iterator[str]:
    codec = _bind(codec, LARGE)
    values, threads = _sample(LARGE, 1), torch.get_num_threads()
    payloads = set()
    for count in (1, 2):
        torch.set_num_threads(count)
        payloads.add(bytes(codec.encode(values)))
    torch.set_num_threads(threads)
    if len(payloads) > 1:
        yield "the number of threads changes the payload"


def _bind(codec: Codec, numel: int) -> Codec:
    """Return the codec for a vector of one tensor, as a round binds it."""
    return codec.bind(Layout(((numel,),)), 7)


def _check_outer_step(update: OuterOptimizer) -> Iterator[str]:
    first, again = _outer_state(update), _outer_state(update)
    for state in (first, again):
        _apply_outer(update, state, slice(None))
    yield from _compare(first, again, f"apply {SAME}")
    if not all(torch.isfinite(vector).all() for vector in first.values()):
        yield "apply makes values that are not finite"
    if negative := [name for name in update.positive_slots if (first[name] < 0).any()]:
        yield f"the slot {negative[0]!r} is below zero, although positive_slots names it"
    if update.is_elementwise and _vector_count(update) == 1:
        cut = _outer_state(update)
        for part in (slice(1000, None), slice(0, 1000)):
            _apply_outer(update, cut, part)
        yield from _compare(first, cut, "is_elementwise is True, but slabs give other values than the whole vector")


def _outer_state(update: OuterOptimizer) -> dict[str, Tensor]:
    return {"anchor": _sample(3000, 1), **{name: torch.zeros(3000) for name in update.slots}}


def _vector_count(update: OuterOptimizer) -> int:
    """Return how many vectors a contribution has one after the other."""
    return min(SIGNALS[signal]().vector_count for signal in update.signals)


def _apply_outer(update: OuterOptimizer, state: dict[str, Tensor], part: slice) -> None:
    """Apply three rounds to a part of the vectors."""
    for count in range(3):
        delta = _sample(3000 * _vector_count(update), 10 + count)
        delta = delta[part].clone()
        slots = {name: state[name][part] for name in update.slots}
        update.apply(state["anchor"][part], slots, delta, OuterStep(count, 30 * count, 1.0))


def _check_inner_step(inner: InnerUpdateRule) -> Iterator[str]:
    first, again = _inner_state(inner), _inner_state(inner)
    for state in (first, again):
        _step_inner(inner, state, slice(None))
    yield from _compare(first, again, f"step {SAME}")
    if not all(torch.isfinite(vector.float()).all() for vector in first.values()):
        yield "step makes values that are not finite"
    if first["weights"].shape != (LAYOUT.numel,):
        yield "step must change the weights in place"
    numels = {inner.vector_numel(name, LAYOUT) for name in inner.vectors}
    if inner.is_elementwise and numels <= {LAYOUT.numel}:
        cut = _inner_state(inner)
        for start, stop in ((1000, LAYOUT.numel), (0, 1000)):
            _step_inner(inner, cut, slice(start, stop))
        yield from _compare(first, cut, "is_elementwise is True, but slabs give other values than the whole vector")


def _inner_state(inner: InnerUpdateRule) -> dict[str, Tensor]:
    vectors = {
        name: torch.zeros(inner.vector_numel(name, LAYOUT), dtype=inner.vector_dtype(name)) for name in inner.vectors
    }
    return {"weights": _sample(LAYOUT.numel, 1), **vectors}


def _step_inner(inner: InnerUpdateRule, state: dict[str, Tensor], part: slice) -> None:
    """Make three steps on a part of the vectors."""
    matrices = [(span, shape) for shape, span in LAYOUT.iter_tensors() if len(shape) > 1]
    for count in range(3):
        step = InnerStep(count, 1e-3, 0.9, 0.95, 0.1, LAYOUT.matrix_spans, LAYOUT.spans, matrices[1:-1])
        gradient = _sample(LAYOUT.numel, 20 + count)[part].clone()
        whole = part.start is None and part.stop is None
        vectors = {name: state[name] if whole else state[name][part] for name in inner.vectors}
        inner.step(
            state["weights"][part], gradient, vectors, step if whole else step.within(part.start or 0, part.stop)
        )


def _check_aggregation(rule: AggregationRule) -> Iterator[str]:
    payloads = [_payload(seed, 100.0 + seed) for seed in range(4)]
    combined = _combine(rule, payloads)
    if combined.shape != (2000,) or combined.dtype != np.float32 or not np.isfinite(combined).all():
        yield "combine must return as many finite fp32 values as a payload has"
    if not np.array_equal(combined, _combine(rule, payloads)):
        yield f"combine {SAME}"
    absent = replace(_payload(9, 1.0), weight=0.0)
    if not np.array_equal(combined, _combine(rule, [*payloads, absent])):
        yield "a payload of weight zero must change nothing"
    equal = [_payload(1, 100.0)] * 3
    norms = [float(np.linalg.norm(each)) for each in (_combine(rule, equal), _sample(2000, 1).numpy())]
    if norms[0] > norms[1] * 1.001:
        yield "equal contributions must not become a longer one"
    for fault, wrong in (("no payload has a weight", [absent]), ("a weight is negative", [_payload(1, -1.0)])):
        if not _refuses(lambda wrong=wrong: _combine(rule, wrong)):  # type: ignore[misc]
            yield f"combine must raise OptimError if {fault}"


def _check_large_contributions(rule: AggregationRule) -> Iterator[str]:
    honest = [_payload(seed, 100.0) for seed in range(5)]
    verdict = rule.screen([*honest, _payload(7, 100.0, scale=1e5)], _norm_of(honest), _state(rule))
    if verdict.payloads[-1].weight:
        yield "screen must leave out a contribution whose norm is far above the usual one"


def _payload(seed: int, weight: float, scale: float = 1.0) -> WeightedPayload:
    codec = Uncompressed()
    return WeightedPayload(codec, codec.encode(_sample(2000, seed, scale)), 2000, weight)


def _norm_of(payloads: Sequence[WeightedPayload]) -> float:
    return max(payload.decode().norm() for payload in payloads)


def _state(rule: AggregationRule) -> np.ndarray[Any, Any] | None:
    return np.zeros(rule.state_size, np.float32) if rule.state_size else None


def _combine(rule: AggregationRule, payloads: Sequence[WeightedPayload]) -> np.ndarray[Any, Any]:
    return rule.combine(payloads, _state(rule))


def _check_schedule(schedule: EverySteps) -> Iterator[str]:
    if schedule.experts_every > 1:
        return
    period = schedule.period
    if period < 1 or any(schedule.steps(number) < 1 for number in range(4 * period)):
        yield "period and the steps of each round must be at least 1"
        return
    sent = np.zeros(LAYOUT.numel, np.int64)
    for number in range(period):
        for start, stop in schedule.spans(number, LAYOUT):
            if not 0 <= start < stop <= LAYOUT.numel:
                yield f"round {number} sends values {start} to {stop} of a vector of {LAYOUT.numel}"
                return
            sent[start:stop] += 1
    if (sent != 1).any():
        yield f"each value must be sent once in a period of {period} rounds"
    if any(schedule.spans(number, LAYOUT) != schedule.spans(number + period, LAYOUT) for number in range(period)):
        yield f"rounds that are a period of {period} apart must send the same values"


def _compare(first: dict[str, Tensor], second: dict[str, Tensor], fault: str) -> Iterator[str]:
    if any(not torch.equal(first[name], second[name]) for name in first):
        yield fault


def _refuses(action: Callable[[], object]) -> bool:
    """Return whether an action raises an error of this package."""
    try:
        action()
    except OptimError:
        return True
    return False


_CHECKS: Final[dict[str, tuple[Callable[[Any], Iterator[str]], ...]]] = {
    "codec": (
        *(_check_round_trip, _check_subtraction, _check_refusal_of_values, _check_refusal_of_payloads),
        *(_check_hostile_payloads, _check_allocation, _check_threads),
    ),
    "update": (_check_outer_step,),
    "inner": (_check_inner_step,),
    "aggregate": (_check_aggregation, _check_large_contributions),
    "schedule": (_check_schedule,),
}
