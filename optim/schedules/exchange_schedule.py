"""The schedule of exchanges: which values are sent when, how long they may travel, and how many peers to wait for."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from optim.errors import UnknownOption
from optim.layout import Layout, Span, merge_adjacent
from optim.options import STRICT

Pattern = Literal["strided", "contiguous"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EverySteps:
    """Send every value once in `inner_steps` local steps.

    All values are sent in one contribution or, as in Streaming DiLoCo (arXiv 2501.18512), in `fragments` contributions
    one after the other: fragment p of P in rounds p, P + p, 2 P + p, ...

    `ahead` is the number of steps that a peer trains on while its contribution travels; then it waits for the result
    (0: at once). `delay` is the least number of steps after which the result is applied, so that all peers with a fast
    enough link apply it at the same step (with a delay of `ahead` steps).

    `seconds` makes a contribution due after that time as well, once the peer has made `least_steps`; 0 means never. All
    peers then finish at the same time, each with as many steps as it makes: a common clock (A-EDiT, arXiv 2412.07210),
    steps within bounds so that a group arrives together (FedCompass, arXiv 2309.14675), or steps in proportion to
    speed, if it is the time that the fastest peer takes for `inner_steps` (dynamic local updates, arXiv 2401.09135):

        K_i = min(inner_steps, max(least_steps, ceil(seconds / seconds of a step)))

    `experts_every` = k above 1 sends each expert of a mixture of experts only in every k-th contribution that could
    carry it, a k-th of them in each, because an expert changes by fewer tokens than the rest (SPES, arXiv 2602.11543).
    The movement of an expert is kept until its turn.

    `experts` = "trained" leaves out of each contribution the experts that its maker has hardly trained
    (`optim.experts`) and averages each expert over those who sent it. The movement of the others is kept.

    `quorum` is the fraction of the living peers whose contributions close the roster of a round (1: all, within the
    grace period).
    """

    kind: ClassVar[str] = "every-steps"

    inner_steps: int = Field(default=30, ge=1, le=100_000)
    ahead: int = Field(default=0, ge=0, le=100_000)
    delay: int = Field(default=0, ge=0, le=100_000)
    fragments: int = Field(default=1, ge=1, le=1024)
    pattern: Pattern = "strided"
    experts_every: int = Field(default=1, ge=1, le=64)
    experts: Literal["all", "trained"] = "all"
    quorum: float = Field(default=1.0, gt=0, le=1)
    seconds: float = Field(default=0.0, ge=0, le=86_400)
    least_steps: int = Field(default=1, ge=1, le=100_000)

    @model_validator(mode="after")
    def _check_bounds(self) -> "EverySteps":
        if self.delay > self.ahead:
            raise ValueError("delay must not be above ahead: a peer applies a result once it waits for it")
        if self.fragments > self.inner_steps:
            raise ValueError("fragments must not be above inner_steps: each takes at least one step")
        return self

    @property
    def is_whole(self) -> bool:
        """Return whether each contribution carries all values."""
        return self.fragments == self.experts_every == 1

    @property
    def period(self) -> int:
        """Return the number of rounds after which the same values are sent again."""
        return self.fragments * self.experts_every

    def steps(self, round_number: int) -> int:
        """Return the local steps of that round: floor((r + 1) H / P) - floor(r H / P), so that P rounds make H."""
        before, after = ((round_number + more) % self.fragments * self.inner_steps // self.fragments for more in (0, 1))
        return after - before if after > before else self.inner_steps - before

    def is_due(self, steps: int, seconds: float) -> bool:
        """Return whether time alone makes a contribution due after that many steps and seconds of training."""
        return 0 < self.seconds <= seconds and steps >= self.least_steps

    def spans(self, round_number: int, layout: Layout) -> tuple[Span, ...]:
        """Return the spans of a vector of that layout to send in that round.

        Block b of the model is in fragment b mod P (strided), or neighbouring blocks are together (contiguous).

        Raises:
            UnknownOption: the model has fewer blocks than fragments.
        """
        if self.is_whole:
            return ((0, layout.numel),)
        if self.fragments > len(layout.block_spans):
            raise UnknownOption(
                f"schedule.fragments = {self.fragments}: the model has {len(layout.block_spans)} blocks; use fewer"
            )
        sent = self._blocks(round_number, len(layout.block_spans))
        if self.experts_every == 1:
            return merge_adjacent([layout.block_spans[number] for number in sent])
        if not layout.experts:
            raise UnknownOption(f"schedule.experts_every = {self.experts_every}: the model has no experts; set it to 1")
        turn, blocks = round_number // self.fragments % self.experts_every, layout.block_numbers
        places = zip(layout.spans, blocks, layout.experts, strict=True)
        is_due = [expert < 0 or expert % self.experts_every == turn for expert in range(-1, max(layout.experts) + 1)]
        return merge_adjacent([span for span, block, expert in places if block in sent and is_due[expert + 1]])

    def _blocks(self, round_number: int, count: int) -> range:
        """Return the numbers of the blocks of a round's fragment."""
        fragment, fragments = round_number % self.fragments, self.fragments
        if self.pattern == "strided":
            return range(fragment, count, fragments)
        return range(count * fragment // fragments, count * (fragment + 1) // fragments)


Schedule = EverySteps
