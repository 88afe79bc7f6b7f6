"""A newcomer whose daemon is ten times slower than the others' comes into the rounds of a fast run, and stays."""

from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest

from node.loop import actions
from node.loop.options import LoopOptions
from node.loop.round_loop import RoundLoop
from node.simulation.swarm import VirtualSwarm, simulated_peer_id
from node.simulation.virtual.peer import VirtualPeer
from protocol.consensus import pacing
from tests.node.simulation.virtual_swarm import make_config, make_corpus, make_method

PERIOD, SPEED = 2, 8.0  # a round of a peer alone takes a third of a second
REACTION = 0.02
ARRIVAL_SECONDS, TRAINER_SECONDS = 3.0, 3.0  # the newcomer's trainer starts while the others pass ten rounds
MAX_GAP_ROUNDS = 2  # in a row without the newcomer, once it is in
FIRST_SECONDS, WATCHED_SECONDS = 10.0, 18.0  # after the arrival
SLOW_ACTIONS = (
    actions.AdoptState,
    actions.AdvanceState,
    actions.ApplyCommit,
    actions.FetchBlob,
    actions.FindPath,
    actions.PublishHead,
    actions.StartTrainer,
    actions.TakeState,
)


class SlowPeer(VirtualPeer):
    """A peer whose daemon takes its reaction time for each step of the work, one after the other."""

    @property
    def _is_newcomer(self) -> bool:
        return self.slot == self.swarm.config.peers - 1

    def _build_loop(self) -> RoundLoop:
        loop = super()._build_loop()
        options: LoopOptions = replace(loop._options, has_contacts=self._is_newcomer)
        loop._options = options  # the founders begin by themselves
        return loop

    def _run_action(self, action: actions.LoopAction) -> None:
        if not isinstance(action, SLOW_ACTIONS):
            return super()._run_action(action)
        starts = isinstance(action, actions.StartTrainer) and self._is_newcomer
        self.call_later(self._reaction + starts * TRAINER_SECONDS, partial(self._run_late, action))

    def _run_late(self, action: actions.LoopAction) -> None:
        super()._run_action(action)
        if not self._is_handling:
            self._handle([])


class GrowingSwarm(VirtualSwarm):
    """A swarm of peers that train, which one more peer joins later."""

    def start(self) -> None:
        """Let all peers but the last join now."""
        last = self.config.peers - 1
        peers = [self._new_peer(slot) for slot in range(last)]
        self.gossip.start_with({peer.peer_id: peer.chain.head for peer in peers})
        for peer in peers:
            peer.start()
        self.clock.schedule(ARRIVAL_SECONDS, partial(self._join, last))

    def _join(self, slot: int) -> None:
        self._new_peer(slot).start()


def watch(peers: int, slowness: float, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """Return the time after the arrival of each round, and whether it includes the newcomer."""
    monkeypatch.setattr("node.simulation.swarm.VirtualPeer", SlowPeer)
    for module in ("node.simulation.virtual.peer", "node.simulation.shared_compute"):
        monkeypatch.setattr(f"{module}.KEPT_ROUNDS", 128)  # daemons keep rounds by time
    given = make_config(peers, 100_000, speeds=(SPEED,) * peers)
    timing = given.manifest.round.model_copy(update={"grace": 1.0})
    reactions = (REACTION,) * (peers - 1) + (slowness * REACTION,)
    config = replace(
        given, manifest=given.manifest.model_copy(update={"round": timing}), reactions=reactions, latency=0.005
    )
    swarm = GrowingSwarm(config, make_method("diloco", PERIOD), make_corpus(), lambda *_: None, lambda: None)
    swarm.start()
    newcomer, found, seen = simulated_peer_id(peers - 1, 1), list[tuple[float, bool]](), set[int]()

    def is_over() -> bool:
        chain = swarm.peers[simulated_peer_id(0, 1)].chain
        for entry in chain.log.commits[-2:]:
            if entry.body.round not in seen:
                seen.add(entry.body.round)
                found.append((swarm.clock.now - ARRIVAL_SECONDS, newcomer in entry.body.by_sender))
        return swarm.clock.now > ARRIVAL_SECONDS + WATCHED_SECONDS

    swarm.clock.run(is_over)
    return found


@pytest.mark.parametrize("peers", [2, 3])
def test_slow_daemon_is_included_soon_and_stays(peers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = watch(peers, 10.0, monkeypatch)
    included = [at for at, has_newcomer in rounds if has_newcomer]
    assert included and included[0] < FIRST_SECONDS
    after_first = [has_newcomer for at, has_newcomer in rounds if at >= included[0]]
    gaps = [len(list(gap)) for has_newcomer, gap in groupby(after_first) if not has_newcomer]
    assert max(gaps, default=0) <= MAX_GAP_ROUNDS


def test_slow_daemon_is_lost_without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "MAX_PATIENCE", 0.0)
    assert not any(has_newcomer for _, has_newcomer in watch(2, 10.0, monkeypatch))
    assert any(has_newcomer for _, has_newcomer in watch(2, 1.0, monkeypatch))


def test_newcomer_that_never_contributes_delays_a_run_by_a_twentieth() -> None:
    patience, now, waited = pacing.Patience(), 0.0, 0.0
    for _ in range(5000):  # rounds of a quarter of a second, all of which could wait for two seconds more
        spent = patience.for_round(2.0, now)
        patience.spend(spent)
        waited, now = waited + spent, now + 0.25 + spent
    assert waited <= pacing.MAX_PATIENCE + pacing.PATIENT_SHARE * now
