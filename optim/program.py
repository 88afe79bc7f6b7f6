"""A method for one model over the rounds of a run: what each round exchanges, and what comes of it. PURE."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch

from optim.codecs.codec import Codec
from optim.layout import Layout, Span
from optim.method import Method
from optim.updates import Moment

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

    @cached_property
    def numel(self) -> int:
        """Values of a message."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def max_sizes(self) -> list[int]:
        """Of each part's payload, in bytes."""
        return [codec.max_bytes(stop - start) for codec, (start, stop) in zip(self.codecs, self.bounds, strict=True)]

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """What is sent of it; the vector itself where that is all."""
        if self.numel == vector.numel():
            return vector
        return torch.cat([vector[start:stop] for start, stop in self.spans])

    def scatter(self, message: torch.Tensor, vector: torch.Tensor) -> None:
        """The opposite, into `vector`."""
        if message.data_ptr() == vector.data_ptr():
            return
        sizes = [stop - start for start, stop in self.spans]
        for piece, (start, stop) in zip(torch.split(message, sizes), self.spans, strict=True):
            vector[start:stop] = piece

    def may_join(self, other: "Plan") -> bool:
        """Whether a message made for this round means the same in the other."""
        mine, theirs = ((plan.spans, plan.bounds, plan.codecs) for plan in (self, other))
        return self.round == other.round or (self.method.signal.is_delta and mine == theirs)


class Program:
    """`parts`: into how many a butterfly cuts a message."""

    def __init__(self, method: Method, layout: Layout, parts: int) -> None:
        self.method, self.layout, self._parts = method, layout, parts
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
        """Rounds after which the same values are sent again, as the run begins."""
        return range(math.lcm(self.method.schedule.fragments, self.method.signal.cycle))

    def telling_rounds(self) -> Iterator[int]:
        """Rounds among which every size is at its greatest: each fragment, or period, at each turn of a course."""
        for knot in self.method.knots:
            yield from range(knot, knot + len(self.cycle))

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
        return Moment(round_number, self.steps_before(round_number), decay, self.layout.matrices)

    def apply(
        self, plan: Plan, anchor: torch.Tensor, slots: Mapping[str, torch.Tensor], merged: torch.Tensor, decay: float
    ) -> None:
        """Move `anchor` and `slots` in place by what a round came to; flat fp32 on the CPU, `merged` as in the plan."""
        signal, numel = plan.method.signal, self.numel
        moment = self.moment(plan.round, decay)
        if plan.numel == numel * signal.width and not signal.averaged:
            plan.method.update.apply(anchor, slots, merged, moment)
            return
        vectors = [anchor, *(slots[name] for name in signal.averaged)]
        position = 0
        for start, stop in plan.spans:
            piece, position = merged[position : position + stop - start], position + stop - start
            place, first = divmod(start, numel)
            self._apply_span(plan, vectors, slots, (place, first, first + stop - start), piece, moment)

    def _apply_span(
        self,
        plan: Plan,
        vectors: Sequence[torch.Tensor],
        slots: Mapping[str, torch.Tensor],
        where: tuple[int, int, int],
        piece: torch.Tensor,
        moment: Moment,
    ) -> None:
        """An update takes a span of the weights; what is averaged moves by the whole mean."""
        place, start, stop = where
        if place:
            vectors[place][start:stop] -= piece
            return
        near = {name: slots[name][start:stop] for name in plan.method.update.slots}
        plan.method.update.apply(vectors[0][start:stop], near, piece, moment.within(start, stop))


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
