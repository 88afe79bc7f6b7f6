"""A method for one model over the rounds of a run: what each round exchanges, and what comes of it. PURE."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import torch

from optim.codecs.codec import Codec
from optim.errors import UnknownOption
from optim.layout import Layout, Span, within
from optim.memory import copy, empty
from optim.method import NO_VECTORS, USUAL, Method
from optim.penalty import MOST_BLOCKS
from optim.threads import each, scratch
from optim.updates import Moment
from optim.usual import share_of, usual_after
from optim.vectors import PlainVector, Vector, wide_slabs

KEPT_PLANS = 64


@dataclass(frozen=True)
class Plan:
    """One round. `spans`: what is sent of the signal's vectors; `bounds`: its parts, as places in the message, each
    with its codec."""

    round: int
    method: Method
    spans: tuple[Span, ...]
    bounds: tuple[Span, ...]
    codecs: tuple[Codec, ...]

    @property
    def steps(self) -> int:
        """Local steps before the message."""
        return self.method.schedule.steps(self.round)

    @property
    def overlaps(self) -> bool:
        """Whether peers train on while their messages travel."""
        return self.method.schedule.ahead > 0

    @cached_property
    def numel(self) -> int:
        """Values of a message."""
        return _size(self.spans)

    @property
    def max_sizes(self) -> list[int]:
        """Of each part's payload, in bytes."""
        return [codec.max_bytes(stop - start) for codec, (start, stop) in self.parts]

    @property
    def parts(self) -> Iterator[tuple[Codec, Span]]:
        """Each part's codec and place in the message."""
        return zip(self.codecs, self.bounds, strict=True)

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """What is sent of it; a view where that is one span."""
        return _gather(vector, self.spans)

    def scatter(self, message: torch.Tensor, vector: torch.Tensor) -> None:
        """The opposite, into `vector`."""
        _scatter(message, vector, self.spans)

    def may_join(self, other: "Plan") -> bool:
        """Whether a message made for this round means the same in the other."""
        if self.round == other.round:
            return True
        if not self.method.signal.is_delta or any(codec.reads_by_round for codec in self.codecs):
            return False
        return (self.spans, self.bounds, self.codecs) == (other.spans, other.bounds, other.codecs)


class Program:
    """`parts`: into how many a butterfly cuts a message. UnknownOption for a method whose parts do not fit together."""

    def __init__(self, method: Method, layout: Layout, parts: int) -> None:
        _check(method)
        if method.aggregate.memory and len(layout.block_spans) > MOST_BLOCKS:
            raise UnknownOption(f"aggregate.statistics: a model of more than {MOST_BLOCKS} blocks; set it to 'round'")
        self.method = method
        self.layout = layout
        self._parts = parts
        self.plan = lru_cache(maxsize=KEPT_PLANS)(self._plan)

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.layout.numel

    @property
    def message_numel(self) -> int:
        """Values of the signal's vectors, of which a message carries some."""
        return self.numel * self.method.signal.width

    def _plan(self, round_number: int) -> Plan:
        method = self.method.at(round_number)
        spans = method.signal.spans(round_number, self.layout, method.schedule)
        section = self.layout.repeated(method.signal.width).section(spans)
        if method.topology.kind == "butterfly" and self._parts > 1:
            bounds = part_bounds(section.numel, self._parts, method.codec.alignment)
            tensors = [Layout(((stop - start,),)) for start, stop in bounds]
        else:
            bounds, tensors = ((0, section.numel),), [section]
        codecs = tuple(method.codec.bind(layout, round_number) for layout in tensors)
        return Plan(round_number, method, spans, bounds, codecs)

    @property
    def cycle(self) -> range:
        """Rounds after which the same values are sent again, once no option changes any more."""
        settled = self.method.knots[-1]
        return range(settled, settled + math.lcm(self.method.schedule.fragments, self.method.signal.cycle))

    def telling_rounds(self) -> Iterator[int]:
        """Rounds among which every size is at its greatest: each fragment, or period, at each turn of a course."""
        cycle = len(self.cycle)
        for knot in self.method.knots:
            yield from range(max(0, knot - cycle + 1), knot + cycle)

    @cached_property
    def max_parts(self) -> int:
        return max(len(self.plan(number).bounds) for number in self.telling_rounds())

    @cached_property
    def max_part_bytes(self) -> int:
        return max(max(self.plan(number).max_sizes) for number in self.telling_rounds())

    @cached_property
    def max_message_bytes(self) -> int:
        return max(sum(self.plan(number).max_sizes) for number in self.telling_rounds())

    def steps_before(self, round_number: int) -> int:
        """Local steps that a peer makes before that round's."""
        if self.method.in_round is None:
            schedule = self.method.schedule
            cycles, rest = divmod(round_number, schedule.fragments)
            return cycles * schedule.inner_steps + sum(schedule.steps(number) for number in range(rest))
        return self._steps[round_number] if round_number < len(self._steps) else self._count_on(round_number)

    @cached_property
    def _steps(self) -> list[int]:
        return [0]

    def _count_on(self, round_number: int) -> int:
        known = self._steps
        more = (self.method.at(number).schedule.steps(number) for number in range(len(known) - 1, round_number))
        known.extend(list(accumulate(more, initial=known[-1]))[1:])
        return known[round_number]

    def moment(self, round_number: int, decay: float = 1.0) -> Moment:
        """`round` counts how often the values that the round sends were updated before."""
        updates = round_number // self.method.schedule.fragments
        return Moment(updates, self.steps_before(round_number), decay, self.layout.matrices)

    def moved(
        self, plan: Plan, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], merged: Vector, decay: float,
        weights: Sequence[float],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A new anchor and new slots, moved by what a round came to; flat fp32 on the CPU, `merged` as in the plan.
        `weights`: of the round's members."""
        numbers = {name: slots[name] for name in NO_VECTORS if name in slots}
        share = 1.0
        if USUAL in numbers:
            numbers[USUAL] = usual_after(weights, numbers[USUAL])
            share = share_of(weights, numbers[USUAL])
        vectors = {name: slot for name, slot in slots.items() if name not in numbers}
        anchor, vectors = self._move(plan, anchor, vectors, merged, decay, share)
        return anchor, vectors | numbers

    def _move(
        self, plan: Plan, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], merged: Vector, decay: float,
        share: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`share`: of the way that the update would make of it."""
        signal, update = plan.method.signal, plan.method.update
        is_whole = plan.numel == self.numel * signal.width and not signal.averaged
        if is_whole and update.rate is not None:
            moved = empty(self.numel)
            merged.write_sum(anchor.numpy(), -update.rate * share, moved)
            return torch.from_numpy(moved), dict(slots)
        if is_whole and update.is_elementwise:
            return self._move_in_slabs(plan, anchor, slots, merged, decay, share)
        anchor, slots = copy(anchor), {name: copy(slot) for name, slot in slots.items()}
        if is_whole:
            update.apply(anchor, slots, _shortened(_dense(merged), share), self.moment(plan.round, decay))
        else:
            self._move_spans(plan, anchor, slots, _dense(merged), decay, share)
        return anchor, slots

    def _move_in_slabs(
        self, plan: Plan, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], merged: Vector, decay: float,
        share: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Everything that is done to a slab while it is in the cache."""
        update, moment = plan.method.update, self.moment(plan.round, decay)
        moved = torch.from_numpy(empty(self.numel))
        new = {name: torch.from_numpy(empty(self.numel)) for name in slots}

        def move(part: slice) -> None:
            delta = scratch("delta", np.float32, part.stop - part.start)
            merged.restore(part, delta)
            if share != 1:
                delta *= np.float32(share)
            moving = {name: vector[part].copy_(slots[name][part]) for name, vector in new.items()}
            update.apply(moved[part].copy_(anchor[part]), moving, torch.from_numpy(delta), moment)

        each(move, wide_slabs(self.numel))
        return moved, new

    def _move_spans(
        self, plan: Plan, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], merged: torch.Tensor, decay: float,
        share: float,
    ) -> None:
        update, moment = plan.method.update, self.moment(plan.round, decay)
        spans = within(plan.spans, 0, self.numel)
        moment = replace(moment, matrices=self.layout.section(spans).matrices)
        sent, averaged = torch.split(merged, [size := _size(spans), plan.numel - size])
        vectors = [anchor, *(slots[name] for name in update.slots)]
        near = [_gather(vector, spans) for vector in vectors]
        update.apply(near[0], dict(zip(update.slots, near[1:], strict=True)), _shortened(sent, share), moment)
        for piece, vector in zip(near, vectors, strict=True):
            _scatter(piece, vector, spans)
        self._average(plan, slots, averaged)

    def _average(self, plan: Plan, slots: Mapping[str, torch.Tensor], sent: torch.Tensor) -> None:
        """What no update moves moves by the whole mean."""
        signal, numel = plan.method.signal, self.numel
        spans = within(plan.spans, numel, numel * signal.width)
        for (start, stop), piece in zip(spans, torch.split(sent, [stop - start for start, stop in spans]), strict=True):
            first = start % numel
            slots[signal.averaged[start // numel]][first : first + stop - start] -= piece


def _dense(merged: Vector) -> torch.Tensor:
    if isinstance(merged, PlainVector):
        return torch.from_numpy(merged.values)
    whole = empty(merged.numel)
    merged.write_to(whole)
    return torch.from_numpy(whole)


def _shortened(delta: torch.Tensor, share: float) -> torch.Tensor:
    return delta if share == 1 else delta * share


def _gather(vector: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    pieces = [vector[start:stop] for start, stop in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _scatter(gathered: torch.Tensor, vector: torch.Tensor, spans: Sequence[Span]) -> None:
    for piece, (start, stop) in zip(torch.split(gathered, [stop - start for start, stop in spans]), spans, strict=True):
        if piece.data_ptr() != vector[start:stop].data_ptr():
            vector[start:stop] = piece


def _size(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _check(method: Method) -> None:
    signal, kept = method.signal, method.inner.vectors
    if missing := [name for name in (*signal.averaged, *signal.consumes) if name not in kept]:
        raise UnknownOption(
            f"signal {signal.kind!r} sends {missing[0]!r}, which inner {method.inner.kind!r} does not keep; "
            "choose another of the two"
        )
    first = method.at(0).schedule
    for number in method.knots:
        schedule = method.at(number).schedule
        if (schedule.fragments, schedule.pattern) != (first.fragments, first.pattern):
            raise UnknownOption("schedule.fragments and schedule.pattern must not change over the rounds")
        if method.at(number).aggregate.memory != method.at(0).aggregate.memory:
            raise UnknownOption("aggregate.statistics must not change over the rounds")


def part_bounds(numel: int, parts: int, alignment: int) -> tuple[Span, ...]:
    """Cut [0, numel) into `parts` spans that start at multiples of `alignment` and differ by at most one `alignment`.

    Fewer parts where there are fewer aligned blocks than that: no part is ever empty.
    """
    if numel < 1 or parts < 1:
        raise ValueError("there must be at least one value and one part")
    blocks = -(-numel // alignment)
    parts = min(parts, blocks)
    edges = [blocks * part // parts * alignment for part in range(parts)] + [numel]
    return tuple(zip(edges[:-1], edges[1:], strict=True))
