"""A peer with a quarter of the others' speed takes part in every round and delays none of them."""

import math
from dataclasses import replace

import pytest

from node.model import shape_table
from node.simulation.swarm import VirtualSwarm, simulated_peer_id
from node.simulation.virtual.peer import VirtualPeer
from protocol.consensus.leader import Leader
from protocol.consensus.pacing import Pacing
from protocol.identity import PeerId
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import AdmissionSection
from tests.node.simulation.virtual_swarm import BATCH, make_config, make_corpus, make_method

pytestmark = pytest.mark.slow

SPEEDS = (1.0, 1.0, 1.0, 0.25)
PERIOD, STEPS = 20, 160
GRACE = 5.0


class RecordedSwarm:
    """A simulated swarm that records the time of each round and the steps of each slot in it.

    All peers have a vote from the start, so that a roster waits for them.
    """

    def __init__(self, speeds: tuple[float, ...], grace: float = GRACE, steps: int = STEPS) -> None:
        self.rounds: list[tuple[float, list[int]]] = []
        given = make_config(len(speeds), steps, speeds=speeds)
        timing = given.manifest.round.model_copy(update={"grace": grace})
        voters = AdmissionSection(founders=tuple(simulated_peer_id(slot, 1) for slot in range(len(speeds))))
        manifest = given.manifest.model_copy(update={"round": timing, "admission": voters})
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
        """Return the mean seconds per round."""
        return (self.rounds[last][0] - self.rounds[first][0]) / (last - first)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second that the swarm trained on."""
        return self.swarm.live_peers[0].chain.tokens / self.rounds[-1][0]


def test_slow_peer_is_in_every_round_with_fewer_steps_and_delays_nobody() -> None:
    paced = RecordedSwarm(SPEEDS)
    for _, steps in paced.rounds[:7]:
        assert steps[:3] == [PERIOD] * 3
        assert 4 <= steps[3] <= 6
    equal = RecordedSwarm((1.0,) * 4)
    assert paced.length(1, 6) < 1.03 * equal.length(1, 6)
    assert sum(paced.swarm.accounting.rejections[reason] for reason in ("late", "left out")) == 0


def test_without_pacing_slow_peer_is_left_out_or_delays_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: every round wastes the others' grace, or takes four times as long."""
    paced = RecordedSwarm(SPEEDS)
    monkeypatch.setattr(Pacing, "steps_for", lambda self, number: self._full_steps(number))
    monkeypatch.setattr(VirtualPeer, "_submit_early", lambda self: None)
    left_out = RecordedSwarm(SPEEDS)
    assert sum(steps[3] == 0 for _, steps in left_out.rounds[:6]) >= 4
    assert left_out.length(0, 2) > 1.15 * paced.length(1, 6)
    assert paced.tokens_per_second > 1.1 * left_out.tokens_per_second
    waiting = RecordedSwarm(SPEEDS, grace=1000.0)
    assert waiting.length(1, 5) > 3 * paced.length(1, 6)
    assert paced.tokens_per_second > 2 * waiting.tokens_per_second


def test_two_peers_do_not_slow_each_other_down() -> None:
    pair = RecordedSwarm((1.0, 0.3), steps=200)
    assert all(steps[0] == PERIOD for _, steps in pair.rounds[:8])
    assert all(5 <= steps[1] <= 8 for _, steps in pair.rounds[1:8])


ALIKE = 9  # all are equally fast again from this round on


class SlowForAWhile(RecordedSwarm):
    """A swarm of four with one slow peer from the start and another one from the third round on."""

    def _reached(self, swarm: VirtualSwarm, peer: VirtualPeer) -> None:
        super()._reached(swarm, peer)
        done = len(self.rounds)
        slow = 0 if done >= ALIKE else 1 if done < 3 else 2
        swarm.config = replace(swarm.config, speeds=(1.0,) * (4 - slow) + (0.25,) * slow)


def test_swarm_makes_full_rounds_again_after_half_were_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: half are in time with few steps, so the others are always too late to set an example."""
    again = SlowForAWhile(SPEEDS, steps=400)
    assert all(max(steps[2:]) < PERIOD / 2 for _, steps in again.rounds[6:ALIKE])
    assert all(steps == [PERIOD] * 4 for _, steps in again.rounds[ALIKE + 7 : ALIKE + 10])
    monkeypatch.setattr(Pacing, "_steps_without_reference", lambda self: None)
    stuck = SlowForAWhile(SPEEDS, steps=400)
    assert all(max(steps[2:]) < PERIOD for _, steps in stuck.rounds[ALIKE:])
    assert sum(steps[:2] == [0, 0] for _, steps in stuck.rounds[ALIKE : ALIKE + 10]) >= 4


SECONDS = 0.5  # for one contribution on a normal link


def swarm_with_a_thin_link(share: float) -> RecordedSwarm:
    """Return a swarm of four in which the last peer has this fraction of the others' bandwidth."""
    model = ModelSection(vocabulary=32, width=32, layers=2, heads=2, hidden=64, context=16)
    usual = 4 * shape_table(model).numel / SECONDS
    given = replace(make_config(4, STEPS, model=model), bandwidths=(usual, usual, usual, share * usual))
    watched = RecordedSwarm.__new__(RecordedSwarm)
    watched.rounds = []
    whole = make_method("sparseloco", PERIOD, {"codec": {"kind": "none"}, "feedback": {"kind": "none"}})
    watched.swarm = VirtualSwarm(given, whole, make_corpus(), watched._reached, lambda: None)
    watched.swarm.run()
    return watched


def test_peer_with_a_thin_link_contributes_every_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its contribution misses one round, continues to travel and joins the next; the control waits for it."""
    equal, slim = swarm_with_a_thin_link(1.0), swarm_with_a_thin_link(0.1)
    assert all(0 not in steps for _, steps in equal.rounds)
    assert [steps[3] > 0 for _, steps in slim.rounds[:4]] == [False, True, False, True]
    assert slim.length(0, 4) < 1.15 * equal.length(0, 4)
    assert slim.swarm.accounting.rejections["left out"] > 0
    monkeypatch.setattr(Leader, "_straggler_deadline", lambda self, promised, wanted, now: math.inf)
    assert swarm_with_a_thin_link(0.1).length(0, 4) > 1.4 * equal.length(0, 4)
