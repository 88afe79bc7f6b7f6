"""The rounds of a method for one model: the values that each round exchanges, and its outer step.

This module does no input or output, so that all peers compute the same.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import torch

from optim.aggregation.edit_penalty import MAX_BLOCKS
from optim.aggregation.step_scaling import compute_step_scale, update_reference_weight
from optim.codecs.base import Codec
from optim.errors import UnknownOption
from optim.experts import TrainedExpertsCodec
from optim.inner.base import WEIGHTS
from optim.kernels.buffer_pool import empty
from optim.kernels.parallel import parallel_for, thread_buffer
from optim.kernels.vectors import ArrayVector, Vector, wide_slabs
from optim.layout import Layout, Span, clip_spans
from optim.method import REFERENCE_WEIGHT, SMALL_SLOTS, Method
from optim.outer import OuterStep

MAX_CACHED_PLANS = 64
NO_ROOMS: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True)
class RoundPlan:
    """One round of a method.

    `spans` are the spans of the signal's vectors to send; `part_spans` are the parts of the contribution, each with its
    codec.
    """

    round: int
    method: Method
    spans: tuple[Span, ...]
    part_spans: tuple[Span, ...]
    codecs: tuple[Codec, ...]
    experts: tuple[tuple[int, Span], ...] = ()  # that peers may leave out: their numbers, and places in a contribution

    @property
    def steps(self) -> int:
        """Return the number of local steps before the contribution."""
        return self.method.schedule.steps(self.round)

    @property
    def is_overlapped(self) -> bool:
        """Return whether peers train on while their contributions travel."""
        return self.method.schedule.ahead > 0

    @property
    def lead(self) -> int:
        """Return the steps by which a peer may lead others before it waits; 0 if results are applied at a set step."""
        schedule = self.method.schedule
        return 0 if schedule.delay else schedule.ahead

    @cached_property
    def numel(self) -> int:
        """Return the number of values of a contribution."""
        return _total_size(self.spans)

    @property
    def max_sizes(self) -> list[int]:
        """Return the largest size of each part's payload, in bytes."""
        return [codec.max_bytes(stop - start) for codec, (start, stop) in self.parts]

    @property
    def parts(self) -> Iterator[tuple[Codec, Span]]:
        """Return the codec and the span of each part."""
        return zip(self.codecs, self.part_spans, strict=True)

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the values of a vector that the round sends, as a view if they are one span."""
        return _gather(vector, self.spans)

    def scatter(self, contribution: torch.Tensor, vector: torch.Tensor) -> None:
        """Write the values of a contribution to their places in `vector`; the inverse of `gather`."""
        _scatter(contribution, vector, self.spans)

    @property
    def counts_on_any_chain(self) -> bool:
        """Return whether a contribution means the same from the weights of another chain; an exact step does not."""
        return self.method.signal.is_delta

    def locate(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Return the places in the signal's vectors of spans of a contribution, each within one of the plan's."""
        firsts = list(accumulate((stop - start for start, stop in self.spans), initial=0))
        shifts = [self.spans[number][0] - firsts[number] for number in range(len(self.spans))]
        numbers = [bisect_right(firsts, start) - 1 for start, _ in spans]
        return tuple(
            (start + shifts[number], stop + shifts[number])
            for (start, stop), number in zip(spans, numbers, strict=True)
        )

    def is_compatible_with(self, other: "RoundPlan") -> bool:
        """Return whether a contribution made for this round means the same in the other one."""
        if self.round == other.round:
            return True
        if not self.method.signal.is_delta or any(codec.depends_on_round for codec in self.codecs):
            return False
        return (self.spans, self.part_spans, self.codecs) == (other.spans, other.part_spans, other.codecs)


class RoundPlanner:
    """Plans and applies the rounds of a method for a model.

    A butterfly cuts each contribution into `part_count` parts.

    Raises:
        UnknownOption: the components of the method do not fit together.
    """

    def __init__(self, method: Method, layout: Layout, part_count: int) -> None:
        _check_method(method)
        if method.schedule.experts == "trained" and not layout.expert_spans:
            raise UnknownOption("schedule.experts = 'trained': the model has no experts; set it to 'all'")
        if method.aggregate.keeps_block_statistics and len(layout.block_spans) > MAX_BLOCKS:
            raise UnknownOption(f"aggregate.statistics: a model of more than {MAX_BLOCKS} blocks; set it to 'round'")
        self.method = method
        self.layout = layout
        self._part_count = part_count
        self.plan = lru_cache(maxsize=MAX_CACHED_PLANS)(self._make_plan)

    @property
    def numel(self) -> int:
        """Return the number of parameters of the model."""
        return self.layout.numel

    @property
    def signal_numel(self) -> int:
        """Return the number of values of the signal's vectors, of which a contribution carries some or all."""
        return self.numel * self.method.signal.vector_count

    def _make_plan(self, round_number: int) -> RoundPlan:
        method = self.method.at_round(round_number)
        spans = method.signal.spans(round_number, self.layout, method.schedule)
        section = self.layout.repeat(method.signal.vector_count).select(spans)
        if method.topology.reduces_parts and self._part_count > 1:
            bounds = split_into_parts(section.numel, self._part_count, method.codec.alignment)
            tensors = [Layout(((stop - start,),)) for start, stop in bounds]
        else:
            bounds, tensors = ((0, section.numel),), [section]
        codecs = tuple(method.codec.bind(layout, round_number) for layout in tensors)
        if method.schedule.experts == "all":
            return RoundPlan(round_number, method, spans, bounds, codecs)
        experts = _place_experts(self.layout, spans)
        places = [span for _, span in experts]
        masked = (
            TrainedExpertsCodec(codec, layout, clip_spans(places, *part))
            for codec, layout, part in zip(codecs, tensors, bounds, strict=True)
        )
        return RoundPlan(round_number, method, spans, bounds, tuple(masked), experts)

    @property
    def cycle(self) -> range:
        """Return rounds after which the same values are sent again, once no option changes any more."""
        settled = self.method.breakpoints[-1]
        return range(settled, settled + self.method.period)

    def representative_rounds(self) -> Iterator[int]:
        """Yield rounds that include the largest of every size: each fragment, or period, at each breakpoint."""
        cycle = len(self.cycle)
        for number in self.method.breakpoints:
            yield from range(max(0, number - cycle + 1), number + cycle)

    @cached_property
    def max_steps(self) -> int:
        """Return the most local steps that a peer makes between two contributions."""
        plans = map(self.plan, self.representative_rounds())
        return max(plan.steps + plan.method.schedule.ahead for plan in plans)

    @cached_property
    def max_parts(self) -> int:
        return max(len(self.plan(number).part_spans) for number in self.representative_rounds())

    @cached_property
    def max_part_bytes(self) -> int:
        return max(max(self.plan(number).max_sizes) for number in self.representative_rounds())

    @cached_property
    def max_contribution_bytes(self) -> int:
        return max(sum(self.plan(number).max_sizes) for number in self.representative_rounds())

    def steps_before(self, round_number: int) -> int:
        """Return the number of local steps that a peer makes in all rounds before that one."""
        if self.method.build_for_round is None:
            schedule = self.method.schedule
            cycles, rest = divmod(round_number, schedule.fragments)
            return cycles * schedule.inner_steps + sum(schedule.steps(number) for number in range(rest))
        return (
            self._cumulative_steps[round_number]
            if round_number < len(self._cumulative_steps)
            else self._extend_steps(round_number)
        )

    @cached_property
    def _cumulative_steps(self) -> list[int]:
        return [0]

    def _extend_steps(self, round_number: int) -> int:
        known = self._cumulative_steps
        more = (self.method.at_round(number).schedule.steps(number) for number in range(len(known) - 1, round_number))
        known.extend(list(accumulate(more, initial=known[-1]))[1:])
        return known[round_number]

    def outer_step(self, round_number: int, decay: float = 1.0) -> OuterStep:
        """Return the position of a round's outer step.

        Its `count` is the number of earlier updates of the values that the round sends.
        """
        updates = round_number // self.method.schedule.fragments
        return OuterStep(updates, self.steps_before(round_number), decay, self.layout.matrix_spans)

    def apply_outer_step(
        self,
        plan: RoundPlan,
        anchor: torch.Tensor,
        slots: Mapping[str, torch.Tensor],
        merged: Vector,
        decay: float,
        weights: Sequence[float],
        rooms: Mapping[str, torch.Tensor] = NO_ROOMS,
        unsent: Sequence[Span] = (),
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a new anchor and new slots, moved by the merged vector of a round.

        The anchor and the slots are flat fp32 on the CPU and are not changed; `merged` is laid out as in the plan.
        `decay` is the remaining fraction of the run's learning rate, `weights` those of the round's members. `rooms`
        is memory for new vectors by name, "weights" for the anchor; the others are in new memory. Spans of the
        contribution that nobody sent (`unsent`) stay as they are.
        """
        small_slots = {name: slots[name] for name in SMALL_SLOTS if name in slots}
        scale = 1.0
        if REFERENCE_WEIGHT in small_slots:
            small_slots[REFERENCE_WEIGHT] = update_reference_weight(weights, small_slots[REFERENCE_WEIGHT])
            scale = compute_step_scale(weights, small_slots[REFERENCE_WEIGHT])
        old = {WEIGHTS: anchor, **{name: slot for name, slot in slots.items() if name not in small_slots}}
        new = {name: rooms[name] if name in rooms else torch.from_numpy(empty(self.numel)) for name in old}
        new = self._step(plan, old, new, merged, decay, scale)
        for start, stop in plan.locate(unsent):
            for name, vector in new.items():
                vector[start:stop] = old[name][start:stop]
        return new.pop(WEIGHTS), new | small_slots

    def _step(
        self,
        plan: RoundPlan,
        old: Mapping[str, torch.Tensor],
        new: dict[str, torch.Tensor],
        merged: Vector,
        decay: float,
        scale: float,
    ) -> dict[str, torch.Tensor]:
        """Take an outer step from the vectors `old`, whose length is scaled by `scale`; return those after it.

        They are in the memory `new`, except those that the step leaves as they are.
        """
        signal, update = plan.method.signal, plan.method.update
        is_whole = plan.numel == self.numel * signal.vector_count and not signal.averaged_names
        if is_whole and update.linear_rate is not None:
            merged.write_sum(old[WEIGHTS].numpy(), -update.linear_rate * scale, new[WEIGHTS].numpy())
            return {**old, WEIGHTS: new[WEIGHTS]}
        if is_whole and update.is_elementwise:
            self._step_in_slabs(plan, old, new, merged, decay, scale)
            return new
        for name, vector in new.items():
            vector.copy_(old[name])
        anchor, slots = new[WEIGHTS], {name: vector for name, vector in new.items() if name != WEIGHTS}
        if is_whole:
            update.apply(anchor, slots, _scaled(_to_tensor(merged), scale), self.outer_step(plan.round, decay))
        else:
            self._step_spans(plan, anchor, slots, _to_tensor(merged), decay, scale)
        return new

    def _step_in_slabs(
        self,
        plan: RoundPlan,
        old: Mapping[str, torch.Tensor],
        new: Mapping[str, torch.Tensor],
        merged: Vector,
        decay: float,
        scale: float,
    ) -> None:
        """Take an elementwise outer step, slab by slab, so that all operations on a slab find it in the cache."""
        update, outer_step = plan.method.update, self.outer_step(plan.round, decay)

        def move(part: slice) -> None:
            delta = thread_buffer("delta", np.float32, part.stop - part.start)
            merged.decode_into(part, delta)
            if scale != 1:
                delta *= np.float32(scale)
            slabs = {name: vector[part].copy_(old[name][part]) for name, vector in new.items()}
            update.apply(slabs.pop(WEIGHTS), slabs, torch.from_numpy(delta), outer_step)

        parallel_for(move, wide_slabs(self.numel))

    def _step_spans(
        self,
        plan: RoundPlan,
        anchor: torch.Tensor,
        slots: Mapping[str, torch.Tensor],
        merged: torch.Tensor,
        decay: float,
        scale: float,
    ) -> None:
        """Take an outer step on the spans that the round sent, in place."""
        update, outer_step = plan.method.update, self.outer_step(plan.round, decay)
        spans = clip_spans(plan.spans, 0, self.numel)
        outer_step = replace(outer_step, matrix_spans=self.layout.select(spans).matrix_spans)
        sent, averaged = torch.split(merged, [size := _total_size(spans), plan.numel - size])
        vectors = [anchor, *(slots[name] for name in update.slots)]
        gathered = [_gather(vector, spans) for vector in vectors]
        update.apply(gathered[0], dict(zip(update.slots, gathered[1:], strict=True)), _scaled(sent, scale), outer_step)
        for piece, vector in zip(gathered, vectors, strict=True):
            _scatter(piece, vector, spans)
        self._apply_mean(plan, slots, averaged)

    def _apply_mean(self, plan: RoundPlan, slots: Mapping[str, torch.Tensor], mean: torch.Tensor) -> None:
        """Subtract the whole mean from the vectors that have no outer step."""
        signal, numel = plan.method.signal, self.numel
        spans = clip_spans(plan.spans, numel, numel * signal.vector_count)
        for (start, stop), piece in zip(spans, torch.split(mean, [stop - start for start, stop in spans]), strict=True):
            first = start % numel
            slots[signal.averaged_names[start // numel]][first : first + stop - start] -= piece


def _to_tensor(merged: Vector) -> torch.Tensor:
    if isinstance(merged, ArrayVector):
        return torch.from_numpy(merged.values)
    whole = empty(merged.numel)
    merged.write_to(whole)
    return torch.from_numpy(whole)


def _scaled(delta: torch.Tensor, scale: float) -> torch.Tensor:
    return delta if scale == 1 else delta * scale


def _gather(vector: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    pieces = [vector[start:stop] for start, stop in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _scatter(gathered: torch.Tensor, vector: torch.Tensor, spans: Sequence[Span]) -> None:
    for piece, (start, stop) in zip(torch.split(gathered, [stop - start for start, stop in spans]), spans, strict=True):
        if piece.data_ptr() != vector[start:stop].data_ptr():
            vector[start:stop] = piece


def _place_experts(layout: Layout, spans: Sequence[Span]) -> tuple[tuple[int, Span], ...]:
    """Return number and place in a contribution of the experts that the spans of a layout contain."""
    starts = [start for start, _ in spans]
    firsts = list(accumulate((stop - start for start, stop in spans), initial=0))
    placed = []
    for number, (start, stop) in enumerate(layout.expert_spans):
        span = bisect_right(starts, start) - 1
        if span >= 0 and stop <= spans[span][1]:
            first = firsts[span] + start - starts[span]
            placed.append((number, (first, first + stop - start)))
    return tuple(placed)


def _total_size(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _check_method(method: Method) -> None:
    signal, kept = method.signal, method.inner.vectors
    if missing := [name for name in (*signal.averaged_names, *signal.consumed_names) if name not in kept]:
        raise UnknownOption(
            f"signal {signal.kind!r} sends {missing[0]!r}, which inner {method.inner.kind!r} does not keep; "
            "choose another of the two"
        )
    first = method.at_round(0).schedule
    for number in method.breakpoints:
        schedule = method.at_round(number).schedule
        for key in ("fragments", "pattern", "experts_every", "experts"):
            if getattr(schedule, key) != getattr(first, key):
                raise UnknownOption(f"schedule.{key} must not change over the rounds")
        if method.at_round(number).aggregate.state_size != method.at_round(0).aggregate.state_size:
            raise UnknownOption("aggregate.statistics and aggregate.memory must not change over the rounds")


def split_into_parts(numel: int, part_count: int, alignment: int) -> tuple[Span, ...]:
    """Cut [0, numel) into `part_count` spans that start at multiples of `alignment` and have nearly equal sizes.

    Sizes differ by at most one `alignment`. There are fewer parts if there are fewer aligned blocks: no part is empty.
    """
    if numel < 1 or part_count < 1:
        raise ValueError("there must be at least one value and one part")
    blocks = -(-numel // alignment)
    part_count = min(part_count, blocks)
    edges = [blocks * part // part_count * alignment for part in range(part_count)] + [numel]
    return tuple(zip(edges[:-1], edges[1:], strict=True))
