"""Notice a run whose loss goes the wrong way, and say in one sentence what to look at. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from node.dashboard.run_state.round_history import RoundSummary

RISING_MEASUREMENTS = 5  # in a row that are clearly above the best one
RISE_SHARE = 0.03  # above the best one
DIVERGING_ROUNDS = 3  # in a row above the loss of the first round
UNBOUNDED_LOSS = 1e5  # a peer's claim is cut off at 1e6

Measurement = tuple[int, float]  # rounds before it, loss


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
