"""When which values are sent, how long a message may travel, and who is waited for."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from optim.errors import UnknownOption
from optim.layout import Layout, Span, merge_adjacent
from optim.options import STRICT

Pattern = Literal["strided", "contiguous"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EverySteps:
    """Every value is sent once in `inner_steps` local steps, all in one message or, as in Streaming DiLoCo (arXiv
    2501.18512), in `fragments` messages one after the other: fragment p of P in rounds p, P + p, 2 P + p, ...

    `ahead`: so many steps a peer trains on while its message travels, then it waits for its fate (0: at once).
    `delay`: so many steps after the message the result is applied at the earliest; then it is at the same step on every
    peer whose link is fast enough (a delay of `ahead` steps).
    `seconds`: a message is also due once a peer has trained for so long and made `least_steps`; 0 for never. Everyone
    is then done at the same time, each with as many steps as it makes: a common clock (A-EDiT, arXiv 2412.07210), steps
    within bounds so that a group arrives together (FedCompass, arXiv 2309.14675), and with the time that the fastest
    takes for `inner_steps` those in proportion to speed (dynamic local updates, arXiv 2401.09135):

    K_i = min(inner_steps, max(least_steps, ceil(seconds / seconds of a step)))

    `quorum`: the share of the living peers whose messages close the roster of a round (1: all, within its grace).
    """

    kind: ClassVar[str] = "every-steps"

    inner_steps: int = Field(default=30, ge=1, le=100_000)
    ahead: int = Field(default=0, ge=0, le=100_000)
    delay: int = Field(default=0, ge=0, le=100_000)
    fragments: int = Field(default=1, ge=1, le=1024)
    pattern: Pattern = "strided"
    quorum: float = Field(default=1.0, gt=0, le=1)
    seconds: float = Field(default=0.0, ge=0, le=86_400)
    least_steps: int = Field(default=1, ge=1, le=100_000)

    @model_validator(mode="after")
    def _check_bounds(self) -> "EverySteps":
        if self.delay > self.ahead:
            raise ValueError("delay must not be above ahead: a peer that waits applies what it waits for")
        if self.fragments > self.inner_steps:
            raise ValueError("fragments must not be above inner_steps: each takes a step of its own")
        return self

    def steps(self, round_number: int) -> int:
        """Local steps of that round: floor((r + 1) H / P) - floor(r H / P), so that P rounds make H."""
        before, after = ((round_number + more) % self.fragments * self.inner_steps // self.fragments for more in (0, 1))
        return after - before if after > before else self.inner_steps - before

    def is_due(self, steps: int, seconds: float) -> bool:
        """Whether time alone makes a message due, after so many steps and seconds of training for it."""
        return 0 < self.seconds <= seconds and steps >= self.least_steps

    def spans(self, round_number: int, layout: Layout) -> tuple[Span, ...]:
        """Which values of a vector of that layout are sent in that round: block b of the model in fragment b mod P, or
        neighbouring blocks together. UnknownOption where the model has too few blocks."""
        blocks, count = layout.block_spans, self.fragments
        if count == 1:
            return ((0, layout.numel),)
        if count > len(blocks):
            raise UnknownOption(f"schedule.fragments = {count}: the model has {len(blocks)} blocks; use fewer")
        fragment = round_number % count
        if self.pattern == "strided":
            return merge_adjacent(blocks[fragment::count])
        return merge_adjacent(blocks[len(blocks) * fragment // count : len(blocks) * (fragment + 1) // count])


Schedule = EverySteps
