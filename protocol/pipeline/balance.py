"""The balance of the stages: which peer moves to which stage. PURE.

A pipeline is as fast as its weakest stage. Once a period, right after a commit, every peer works out from the signed
records which single move would help that stage most; peers with the same records choose the same move. The chosen peer
claims the move in its record. After a pause, right after another commit, it moves if no other claim has priority. So
peers with different views do not move at the same time.

    gain = min(rate of the source after the move, rate of the target after it) / rate of the target before - 1

The rate of a stage is the sum of its peers' rates, and the target is the weakest stage. The other stages do not count;
otherwise no move would gain anything where two stages are equally weak. Where stages have work by the speeds of the
manifest, a peer is as much slower at the target as the target has more work.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from protocol.identity import PeerId

MIN_GAIN: Final = 0.1
MIN_LEFT: Final = 2  # peers that stay at the stage that gives one away
PERIOD_EXPIRIES = 12.0  # between two decisions, in multiples of `expiry`
CLAIM_EXPIRIES = 1.0  # from a claim to the move
QUIET_PERIODS = 5.0  # from a move to the next decision
PINNED, MOVABLE, FIRST_CLAIM = 0, 1, 2  # of `stage_move` in a record; a claim adds the stage


@dataclass(frozen=True)
class StageAssignment:
    """A ready trainer as its record shows it. `rate`: microbatches a second, 0 if unknown; `move`: `stage_move`."""

    peer: PeerId
    stage: int
    rate: float
    move: int = MOVABLE


@dataclass(frozen=True)
class Move:
    """A peer that leaves its stage for another one."""

    peer: PeerId
    source: int
    target: int
    gain: float


def sum_rates(rates: Sequence[Sequence[float]]) -> list[float]:
    """Return the rate of each stage, given the rates of its trainers.

    A trainer without a rate (0) counts with the median of the others, or with 1 if no trainer has a rate.
    """
    usual = median([rate for served in rates for rate in served if rate] or [1.0])
    return [math.fsum(rate or usual for rate in served) for served in rates]


def choose_move(assignments: Iterable[StageAssignment], stages: int, speeds: Sequence[float] = ()) -> Move | None:
    """Return the move with the highest gain, ties by peer id; None if no move is worth it, or a stage has no peer.

    A trainer without a rate counts with the median of the others, and does not move. `speeds`: of the stages in the
    manifest, by which they have work; empty if all have as much.
    """
    work = speeds or (1.0,) * stages
    listed = sorted(assignments, key=lambda assignment: assignment.peer)
    members = [[assignment for assignment in listed if assignment.stage == stage] for stage in range(stages)]
    if not all(members):
        return None
    sums = sum_rates([[assignment.rate for assignment in served] for served in members])
    target = sums.index(min(sums))
    moves = [
        Move(assignment.peer, assignment.stage, target, _gain(assignment, target, sums, work))
        for assignment in listed
        if assignment.stage != target
        and assignment.move != PINNED
        and assignment.rate > 0
        and len(members[assignment.stage]) > MIN_LEFT
    ]
    best = max(moves, key=lambda move: round(move.gain, 1), default=None)  # views of rates differ a little
    return best if best is not None and best.gain >= MIN_GAIN else None


def _gain(assignment: StageAssignment, target: int, sums: Sequence[float], work: Sequence[float]) -> float:
    """Estimate the gain of a move; the peer is taken to do as much work a second at the target as at the source."""
    there = assignment.rate * work[assignment.stage] / work[target]
    return min(sums[assignment.stage] - assignment.rate, sums[target] + there) / sums[target] - 1


class Balancer:
    """Decides when this peer moves.

    Args:
        expiry: seconds after which a silent peer's record expires.
        speeds: as `choose_move` takes them.
    """

    def __init__(self, me: PeerId, stages: int, expiry: float, speeds: Sequence[float] = ()) -> None:
        self._me = me
        self._stages = stages
        self._speeds = speeds
        self._expiry = expiry
        self._known: dict[PeerId, int] = {}  # stages of peers
        self._claimed: set[PeerId] = set()  # peers that claimed a move when we last saw them
        self._decides_at: float | None = None
        self._claim: tuple[Move, float] | None = None  # with the time of the claim

    @property
    def move(self) -> int:
        """The value of `stage_move` in our record."""
        return MOVABLE if self._claim is None else FIRST_CLAIM + self._claim[0].target

    def rest(self, now: float) -> None:
        """Decide nothing for a while, because a peer has moved."""
        self._claim = None
        self._decides_at = now + QUIET_PERIODS * PERIOD_EXPIRIES * self._expiry

    def observe(self, assignments: Sequence[StageAssignment], now: float) -> None:
        """Record which peers serve which stages; rest if one has moved, or has claimed a move and is gone."""
        stages = {assignment.peer: assignment.stage for assignment in assignments if assignment.move != PINNED}
        has_moved = any(self._known.get(peer, stage) != stage for peer, stage in stages.items())
        if has_moved or self._claimed - stages.keys():
            self.rest(now)
        self._known |= stages
        self._claimed = set(_claims(assignments))

    def on_commit(self, assignments: Sequence[StageAssignment], now: float) -> Move | None:
        """Return the move that this peer makes now, if any, and update its claim."""
        self.observe(assignments, now)
        if self._decides_at is None:
            self._postpone(now)
        if self._claim is not None:
            return self._settle_claim(*self._claim, assignments, now)
        if now < (self._decides_at or 0.0):
            return None
        self._postpone(now)
        chosen = choose_move(assignments, self._stages, self._speeds)
        if chosen is not None and chosen.peer == self._me and not _claims(assignments):
            self._claim = chosen, now
        return None

    def _settle_claim(
        self, move: Move, since: float, assignments: Sequence[StageAssignment], now: float
    ) -> Move | None:
        """Return a move claimed long enough ago, unless another claim has priority or it no longer pays."""
        if now < since + CLAIM_EXPIRIES * self._expiry:
            return None
        self._claim = None
        self._postpone(now)
        again = choose_move(assignments, self._stages, self._speeds)
        is_first = min([self._me, *_claims(assignments)]) == self._me
        return (
            move if is_first and again is not None and (again.peer, again.target) == (self._me, move.target) else None
        )

    def _postpone(self, now: float) -> None:
        self._decides_at = max(self._decides_at or 0.0, now + PERIOD_EXPIRIES * self._expiry)


def _claims(assignments: Iterable[StageAssignment]) -> list[PeerId]:
    return [assignment.peer for assignment in assignments if assignment.move >= FIRST_CLAIM]
