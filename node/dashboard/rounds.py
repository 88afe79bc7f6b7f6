"""The committed rounds of a run, whether it is over, and warnings about its loss. Immutable.

The history is in chunks that later histories share, so that a round's cost does not grow.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from node.dashboard.events import RunFacts, RunSteered
from protocol.steering import is_stop

CHUNK_ROWS = 256
RISING_MEASUREMENTS = 5  # in a row that are clearly above the best one
RISE_SHARE = 0.03  # above the best one
DIVERGING_ROUNDS = 3  # in a row above the loss of the first round
UNBOUNDED_LOSS = 1e5  # a peer's claim is cut off at 1e6
Measurement = tuple[int, float]  # rounds before it, loss


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One committed round; the byte counts are per peer, `seconds` is the time since the previous round.

    `sent_bytes`, the mean score of answers (`reward`, of runs that learn from scores) and the validation losses (of the
    model after this round) are measured later, or never.
    """

    round: int
    at: float | None
    digest: str
    tokens: int
    loss: float
    contributors: int
    late_count: int
    contribution_bytes: float
    all_reduce_bytes: float
    seconds: float | None
    sent_bytes: float | None = None
    reward: float | None = None
    validation_loss: float | None = None
    validation_by_source: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundHistory:
    """The committed rounds in order; appending copies only the last chunk."""

    chunks: tuple[tuple[RoundSummary, ...], ...] = ()
    tail: tuple[RoundSummary, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks) * CHUNK_ROWS + len(self.tail)

    def __iter__(self) -> Iterator[RoundSummary]:
        for chunk in self.chunks:
            yield from chunk
        yield from self.tail

    @property
    def last(self) -> RoundSummary | None:
        return self.tail[-1] if self.tail else self.chunks[-1][-1] if self.chunks else None

    def recent(self, count: int) -> tuple[RoundSummary, ...]:
        """Return the last `count` rows, limited to the last one to two chunks."""
        return ((*self.chunks[-1], *self.tail) if self.chunks else self.tail)[-count:]

    def append(self, row: RoundSummary) -> "RoundHistory":
        """Return the history with one more row."""
        tail = (*self.tail, row)
        return RoundHistory((*self.chunks, tail), ()) if len(tail) == CHUNK_ROWS else RoundHistory(self.chunks, tail)

    def find(self, round_number: int) -> RoundSummary | None:
        """Return the row of a recent round; `None` if it is unknown or too old."""
        return next((row for row in self.recent(2 * CHUNK_ROWS) if row.round == round_number), None)

    def replace_row(self, row: RoundSummary) -> "RoundHistory":
        """Return the history with `row` in place of the recent row of the same round."""
        tail = tuple(row if old.round == row.round else old for old in self.tail)
        if not self.chunks:
            return RoundHistory((), tail)
        chunk = tuple(row if old.round == row.round else old for old in self.chunks[-1])
        return RoundHistory((*self.chunks[:-1], chunk), tail)

    def truncate_from(self, round_number: int) -> "RoundHistory":
        """Return the history without this round and later ones."""
        kept = [row for row in self if row.round < round_number]
        full = len(kept) - len(kept) % CHUNK_ROWS
        chunks = tuple(tuple(kept[start : start + CHUNK_ROWS]) for start in range(0, full, CHUNK_ROWS))
        return RoundHistory(chunks, tuple(kept[full:]))


def progress_to_target(facts: RunFacts | None, last: RoundSummary | None) -> float | None:
    """Return the progress from 0 to 1; `None` for a run without a target."""
    if facts is None or not (facts.target_rounds or facts.target_tokens):
        return None
    rounds, tokens = (last.round + 1, last.tokens) if last else (0, 0)
    targets = ((rounds, facts.target_rounds), (tokens, facts.target_tokens))
    return min(1.0, max(done / target for done, target in targets if target))


def was_stopped(steered: RunSteered | None) -> bool:
    """Return whether the newest target is one of `murmur steer RUN stop`: the round from which it holds."""
    reports = steered.revisions if steered else ()
    for report in reversed(reports):
        if report.holds_from is not None and "target.rounds" in report.changes:
            return is_stop("target.rounds", report.changes["target.rounds"], report.from_round)
    return False


@dataclass(frozen=True, slots=True)
class LossTrend:
    """The first and the newest training losses; the best validation loss and those measured after it."""

    first: float | None = None
    newest: tuple[float, ...] = ()
    best: Measurement | None = None
    since_best: tuple[Measurement, ...] = ()

    def add_loss(self, loss: float) -> "LossTrend":
        """Return the trend with the training loss of one more round."""
        first = loss if self.first is None else self.first
        return replace(self, first=first, newest=(*self.newest, loss)[-DIVERGING_ROUNDS:])

    def add_validation(self, round_number: int, loss: float) -> "LossTrend":
        """Return the trend with one more validation loss, measured after `round_number` rounds."""
        measured = (round_number, loss)
        if self.best is None or loss < self.best[1]:
            return replace(self, best=measured, since_best=())
        return replace(self, since_best=(*self.since_best, measured)[-RISING_MEASUREMENTS:])


def trend_of(rows: Iterable[RoundSummary]) -> LossTrend:
    """Return the trend of these rounds."""
    trend = LossTrend()
    for row in rows:
        trend = trend.add_loss(row.loss)
        if row.validation_loss is not None:
            trend = trend.add_validation(row.round + 1, row.validation_loss)
    return trend


def find_warnings(trend: LossTrend) -> tuple[str, ...]:
    """Return one sentence for each way in which the loss is wrong, the most serious only."""
    warning = _describe_divergence(trend) or _describe_rise(trend)
    return (warning,) if warning else ()


def _describe_divergence(trend: LossTrend) -> str:
    if any(not math.isfinite(loss) or loss > UNBOUNDED_LOSS for loss in trend.newest[-1:]):
        return (
            "The training loss is no longer a usable number: the run has diverged; "
            "lower the learning rate (murmur steer), and see in the table of peers whose gradient norm is out of "
            "line."
        )
    is_above = trend.first is not None and all(loss > trend.first for loss in trend.newest)
    if len(trend.newest) < DIVERGING_ROUNDS or not is_above:
        return ""
    return (
        f"The training loss, {trend.newest[-1]:.3f}, is above that of the first round, {trend.first:.3f}: the run "
        "diverges; lower the learning rate (murmur steer), and see in the table of peers whose gradient norm is out "
        "of line."
    )


def _describe_rise(trend: LossTrend) -> str:
    if trend.best is None or len(trend.since_best) < RISING_MEASUREMENTS:
        return ""
    (best_round, best), (newest_round, newest) = trend.best, trend.since_best[-1]
    if not all(loss > best * (1 + RISE_SHARE) for _, loss in trend.since_best):
        return ""
    return (
        f"The validation loss has risen from {best:.3f} after round {best_round} to {newest:.3f} after round "
        f"{newest_round}: if the training loss still falls, the model learns the text by heart and needs more text; "
        "if not, lower the learning rate (murmur steer)."
    )
