"""One peer at a time moves to the weakest stage, whatever the peers know of one another."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from protocol.pipeline import balance
from protocol.pipeline.balance import MIN_LEFT, PINNED, Balancer, Move, StageAssignment, choose_move

EXPIRY, DOWNLOAD = 4.0, 20.0
MAX_AGE = 3.0  # of a record: one that is not renewed expires
PERIODS, SEEDS = 40, 6


def seats(*stages: list[float], **changes: int) -> list[StageAssignment]:
    """Return peers `a`, `b`, ... with these rates at each stage; `changes` of their `stage_move`."""
    found: list[StageAssignment] = []
    for stage, rates in enumerate(stages):
        for rate in rates:
            name = chr(ord("a") + len(found))
            found.append(StageAssignment(name, stage, rate, changes.get(name, balance.MOVABLE)))
    return found


def test_strongest_stage_gives_a_peer_to_the_weakest() -> None:
    assert choose_move(seats([2, 2, 2], [2]), 2) == Move("a", 0, 1, 1.0)
    assert choose_move(seats([2, 2, 2], [3, 3, 3, 3], [2]), 3) == Move("d", 1, 2, 1.5), "the highest gain"
    assert choose_move(seats([2, 2, 2], [2], [2]), 3) == Move("a", 0, 1, 1.0), "of equally weak stages the first"


@pytest.mark.parametrize(
    "given",
    [
        seats([2, 2], [1]),  # the source would keep one peer
        seats([2, 2, 2], [4, 1.5]),  # less than ten per cent
        seats([2, 2, 2], []),  # its peers may come back, and a newcomer takes it
        seats([0, 0, 0], [2]),  # their rates are not known yet
        seats([2, 2, 2], [2], a=PINNED, b=PINNED, c=PINNED),
    ],
)
def test_moves_that_are_not_made(given: list[StageAssignment]) -> None:
    assert choose_move(given, 2) is None


def test_peer_is_slower_where_a_stage_has_more_work() -> None:
    given = seats([4, 4, 4], [4])
    assert choose_move(given, 2) == Move("a", 0, 1, 1.0)
    assert choose_move(given, 2, (1, 4)) == Move("a", 0, 1, 0.25)
    assert choose_move(given, 2, (1, 20)) is None, "less than ten per cent"


def test_all_choose_alike_in_any_order_and_ties_go_by_peer_id() -> None:
    given = seats([2, 2, 2], [2])
    assert {choose_move(random.Random(seed).sample(given, len(given)), 2) for seed in range(20)} == {
        Move("a", 0, 1, 1.0)
    }


def test_peer_claims_before_it_moves_and_yields_to_a_claim_with_a_lower_id() -> None:
    given = seats([2, 2, 2], [2], a=PINNED)
    for other, moves in ((PINNED, True), (balance.FIRST_CLAIM + 1, False)):
        mover = Balancer("b", 2, EXPIRY)
        period = balance.PERIOD_EXPIRIES * EXPIRY
        assert mover.on_commit(given, 0.0) is None and mover.on_commit(given, period + 1) is None
        assert mover.move == balance.FIRST_CLAIM + 1, "it claims first"
        rival = [replace(given[0], move=other), *given[1:]]
        assert (mover.on_commit(rival, period + 2 + EXPIRY) is not None) == moves
        assert mover.move == balance.MOVABLE


@dataclass
class VirtualPeer:
    """A peer with its own, older view of the others."""

    seat: StageAssignment
    balancer: Balancer
    view: dict[str, StageAssignment] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)  # when it learned of each
    left: set[int] = field(default_factory=set)  # stages that it has served
    back_at: float = 0.0  # it serves nothing before


class VirtualRun:
    """Peers whose rates wander, whose records spread late, and who reach commits at different moments."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"balance {seed}")
        self.stages = self.chance.choice([2, 3, 4])
        self.now = 0.0
        self.peers: dict[str, VirtualPeer] = {}
        self.moves: list[tuple[float, Move]] = []
        self.absent = 0  # at most, at the same time
        self.returns = 0  # to a stage that the peer has left before
        self.fewest = 99  # peers that a stage had after it gave one away
        for number in range(self.stages * 4):
            stage = number % self.stages if number < 2 * self.stages else 0
            name = f"peer-{number:02}"
            seat = StageAssignment(name, stage, self.chance.choice([1.0, 1.0, 2.0, 4.0]))
            self.peers[name] = VirtualPeer(seat, Balancer(name, self.stages, EXPIRY))

    def run(self) -> None:
        for _ in range(int(PERIODS * balance.PERIOD_EXPIRIES * EXPIRY)):
            self.now += 1.0
            for peer in self.chance.sample(list(self.peers.values()), len(self.peers)):
                self._hear(peer)
                peer.balancer.observe(list(peer.view.values()), self.now)
                if self.now >= peer.back_at and self.chance.random() < 0.3:
                    self._commit(peer)

    @property
    def pace(self) -> float:
        return min(
            sum(peer.seat.rate for peer in self.peers.values() if peer.seat.stage == s) for s in range(self.stages)
        )

    def _hear(self, peer: VirtualPeer) -> None:
        """Let a peer learn of the others, of some of them later, but never later than MAX_AGE."""
        for name, other in self.peers.items():
            age = self.now - peer.heard.get(name, -math.inf)
            if name == peer.seat.peer or age >= MAX_AGE or self.chance.random() < 0.5:
                peer.heard[name] = self.now
                seen = replace(other.seat, rate=other.seat.rate * self.chance.uniform(0.97, 1.03))
                peer.view[name] = replace(seen, move=other.balancer.move)
                if self.now < other.back_at:
                    del peer.view[name]

    def _commit(self, peer: VirtualPeer) -> None:
        move = peer.balancer.on_commit(list(peer.view.values()), self.now)
        if move is None:
            return
        self.moves.append((self.now, move))
        self.returns += move.target in peer.left
        peer.left.add(move.source)
        peer.seat, peer.back_at = replace(peer.seat, stage=move.target), self.now + DOWNLOAD
        peer.balancer = Balancer(peer.seat.peer, self.stages, EXPIRY)
        peer.balancer.rest(self.now)
        self.absent = max(self.absent, sum(self.now < other.back_at for other in self.peers.values()))
        left = sum(other.seat.stage == move.source for other in self.peers.values())
        self.fewest = min(self.fewest, left)

    def faults(self) -> list[str]:
        """Return what is wrong with the moves."""
        found = ["two peers move at once"] if self.absent > 1 else []
        found += ["a stage has too few peers"] if self.fewest < MIN_LEFT else []
        found += ["a peer goes back"] if self.returns else []
        return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_peer_at_a_time_moves_and_stages_become_even(seed: int) -> None:
    run = VirtualRun(seed)
    before = run.pace
    run.run()
    assert run.faults() == [] and run.moves
    assert run.pace >= before
    left = choose_move([peer.seat for peer in run.peers.values()], run.stages)
    assert left is None or left.gain < 0.5, "little is left to gain"


@pytest.mark.slow
def test_without_claims_peers_with_different_views_move_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a peer moves as soon as it finds itself chosen by the records that it knows."""

    def decide_alone(self: Balancer, given: list[StageAssignment], now: float) -> Move | None:
        chosen = choose_move(given, self._stages)
        return chosen if chosen is not None and chosen.peer == self._me else None

    monkeypatch.setattr(Balancer, "on_commit", decide_alone)
    found = set[str]()
    for seed in range(SEEDS):
        run = VirtualRun(seed)
        run.run()
        found.update(run.faults())
    assert "two peers move at once" in found
