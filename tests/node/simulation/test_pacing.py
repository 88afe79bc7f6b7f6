"""A peer a quarter as fast as the others takes part in every round, and holds none of them."""

import math
from dataclasses import replace

import pytest

from node.model import shape_table
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual_peer import VirtualPeer
from protocol.consensus.leader import Leader
from protocol.consensus.pacing import Pacing
from protocol.identity import PeerId
from protocol.manifest import ModelSection
from tests.node.simulation.virtual_swarm import BATCH, make_config, make_corpus, make_method

SPEEDS = (1.0, 1.0, 1.0, 0.25)
PERIOD, STEPS = 20, 160
GRACE = 5.0


class Watched:
    """Of each round when it was reached, and the steps that each slot had in it."""

    def __init__(self, speeds: tuple[float, ...], grace: float = GRACE, steps: int = STEPS) -> None:
        self.rounds: list[tuple[float, list[int]]] = []
        given = make_config(len(speeds), steps, speeds=speeds)
        manifest = given.manifest.model_copy(update={"round": given.manifest.round.model_copy(update={"grace": grace})})
        self.swarm = VirtualSwarm(
            replace(given, manifest=manifest), make_method("diloco", PERIOD), make_corpus(), self._reached, lambda: None
        )
        self.swarm.run()

    def _reached(self, swarm: VirtualSwarm, peer: VirtualPeer) -> None:
        commits = peer.chain.commits_since(peer.chain.round - 1) or ()
        tokens: dict[PeerId, int] = {
            entry.sender: entry.body.tokens for commit in commits for entry in commit.body.contributions
        }
        slots = sorted(swarm.peers.values(), key=lambda other: other.slot)
        self.rounds.append((swarm.clock.now, [tokens.get(other.peer_id, 0) // BATCH for other in slots]))

    def length(self, first: int, last: int) -> float:
        """Mean seconds of a round."""
        return (self.rounds[last][0] - self.rounds[first][0]) / (last - first)

    @property
    def tokens_per_second(self) -> float:
        """That the swarm learned from."""
        return self.swarm.live_peers[0].chain.tokens / self.rounds[-1][0]


def test_the_slow_peer_is_in_every_round_with_its_share_and_holds_nobody() -> None:
    paced = Watched(SPEEDS)
    for _, steps in paced.rounds[:7]:
        assert steps[:3] == [PERIOD] * 3
        assert 4 <= steps[3] <= 6
    equal = Watched((1.0,) * 4)
    assert paced.length(1, 6) < 1.03 * equal.length(1, 6)
    assert sum(paced.swarm.accounting.rejections[reason] for reason in ("late", "left out")) == 0


def test_without_pacing_it_is_left_out_or_all_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the others' grace is spent every round for nothing, or a round takes four times as long."""
    paced = Watched(SPEEDS)
    monkeypatch.setattr(Pacing, "steps_for", lambda self, number: self._full_steps(number))
    monkeypatch.setattr(VirtualPeer, "_submit_early", lambda self: None)
    left_out = Watched(SPEEDS)
    assert sum(steps[3] == 0 for _, steps in left_out.rounds[:6]) >= 4
    assert left_out.length(0, 2) > 1.15 * paced.length(1, 6)
    assert paced.tokens_per_second > 1.1 * left_out.tokens_per_second
    waiting = Watched(SPEEDS, grace=1000.0)
    assert waiting.length(1, 5) > 3 * paced.length(1, 6)
    assert paced.tokens_per_second > 2 * waiting.tokens_per_second


def test_a_pair_does_not_wear_each_other_down() -> None:
    pair = Watched((1.0, 0.3), steps=200)
    assert all(steps[0] == PERIOD for _, steps in pair.rounds[:8])
    assert all(5 <= steps[1] <= 8 for _, steps in pair.rounds[1:8])


ALIKE = 9  # from which round on all are equally fast again


class SlowForAWhile(Watched):
    """One of four is slow from the beginning and another one from the third round on."""

    def _reached(self, swarm: VirtualSwarm, peer: VirtualPeer) -> None:
        super()._reached(swarm, peer)
        done = len(self.rounds)
        slow = 0 if done >= ALIKE else 1 if done < 3 else 2
        swarm.config = replace(swarm.config, speeds=(1.0,) * (4 - slow) + (0.25,) * slow)


def test_a_swarm_of_which_half_were_slow_makes_whole_rounds_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: half are in time with few steps, and those who make all are always too late for an example."""
    again = SlowForAWhile(SPEEDS, steps=400)
    assert all(max(steps[2:]) < PERIOD / 2 for _, steps in again.rounds[6:ALIKE])
    assert all(steps == [PERIOD] * 4 for _, steps in again.rounds[ALIKE + 7 : ALIKE + 10])
    monkeypatch.setattr(Pacing, "_steps_without_reference", lambda self: None)
    stuck = SlowForAWhile(SPEEDS, steps=400)
    assert all(max(steps[2:]) < PERIOD for _, steps in stuck.rounds[ALIKE:])
    assert sum(steps[:2] == [0, 0] for _, steps in stuck.rounds[ALIKE : ALIKE + 10]) >= 4


SECONDS = 0.5  # that one message takes on a usual link


def thin(share: float) -> Watched:
    """The last of four peers has that share of the others' bandwidth; all send all their progress to all."""
    model = ModelSection(vocabulary=32, width=32, layers=2, heads=2, hidden=64, context=16)
    usual = 4 * shape_table(model).numel / SECONDS
    given = replace(make_config(4, STEPS, model=model), bandwidths=(usual, usual, usual, share * usual))
    watched = Watched.__new__(Watched)
    watched.rounds = []
    whole = make_method("sparseloco", PERIOD, {"codec": {"kind": "none"}, "feedback": {"kind": "none"}})
    watched.swarm = VirtualSwarm(given, whole, make_corpus(), watched._reached, lambda: None)
    watched.swarm.run()
    return watched


def test_a_thin_link_sends_every_second_round_and_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message is left out of one round, goes on travelling, and joins the next; the control waits for it."""
    equal, slim = thin(1.0), thin(0.1)
    assert all(0 not in steps for _, steps in equal.rounds)
    assert [steps[3] > 0 for _, steps in slim.rounds[:4]] == [False, True, False, True]
    assert slim.length(0, 4) < 1.15 * equal.length(0, 4)
    assert slim.swarm.accounting.rejections["left out"] > 0
    monkeypatch.setattr(Leader, "_straggler_deadline", lambda self, promised, wanted, now: math.inf)
    assert thin(0.1).length(0, 4) > 1.4 * equal.length(0, 4)
