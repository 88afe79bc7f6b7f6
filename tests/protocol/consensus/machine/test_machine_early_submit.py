"""Who has not offered is asked to before the others' grace ends, once, and only for the sake of whole contributions."""

import pytest

from protocol.consensus.events import EarlySubmitPolicy, LocalContribution, RequestEarlySubmit
from protocol.consensus.machine import RoundMachine
from protocol.consensus.settings import RoundStart
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import make_contribution, make_signer


class EarlySubmitCluster(Cluster):
    """All machines are asked `reserve` seconds before the grace ends, for the sake of `whole` tokens."""

    reserve, whole, awaits_half = 0.5, 1, True

    def new_machine(self, name: PeerId, seen: dict[PeerId, float] | None = None) -> RoundMachine:
        settings, urgency = self.scenario.settings(), EarlySubmitPolicy(self.reserve, self.whole, self.awaits_half)
        start = RoundStart(0, BASE, seen or {})
        return RoundMachine(
            settings, name, start, make_signer(name), self.now, early_submit_policy=lambda number: urgency
        )

    def asked_early(self) -> list[PeerId]:
        return [name for name, action in self.log if isinstance(action, RequestEarlySubmit)]


@pytest.mark.parametrize("exchange", ["gather", "butterfly"])
def test_the_one_that_is_missing_is_asked_once_and_comes_in(exchange: str) -> None:
    table = EarlySubmitCluster(3, exchange)
    grace = table.scenario.settings().grace
    *others, late = table.names
    table.contribute(*others)
    table.elapse(grace - 0.8)
    assert table.asked_early() == []
    table.elapse(0.4)
    assert table.asked_early() == [late]
    table.contribute(late)
    table.elapse(grace)
    assert table.asked_early() == [late]
    assert table.included_peers() == {tuple(sorted(table.names))}


def test_without_being_asked_it_is_left_out() -> None:
    """The control of the test above."""
    table = Cluster(3, "gather")
    *others, late = table.names
    table.contribute(*others)
    table.elapse(table.scenario.settings().grace + 0.4)
    table.feed_event(late, LocalContribution(make_contribution(late, 0, BASE, table.scenario)))
    table.deliver_all()
    assert table.included_peers() == {tuple(sorted(others))}


def test_nobody_hurries_for_those_who_made_few_steps_themselves() -> None:
    EarlySubmitCluster.whole, before = 2**40, EarlySubmitCluster.whole
    try:
        table = EarlySubmitCluster(3, "gather")
    finally:
        EarlySubmitCluster.whole = before
    *others, _ = table.names
    table.contribute(*others)
    table.elapse(2 * table.scenario.settings().grace)
    assert table.asked_early() == []


def test_who_has_offered_is_not_asked() -> None:
    table = EarlySubmitCluster(3, "gather")
    table.contribute(table.names[1])
    table.elapse(2 * table.scenario.settings().grace)
    assert table.asked_early() == [], "one of three is not yet half"


def test_who_came_in_the_middle_of_a_round_is_asked_before_half_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is the control: the others wait until half of them have contributed."""
    monkeypatch.setattr(EarlySubmitCluster, "awaits_half", False)
    table = EarlySubmitCluster(3, "gather")
    grace = table.scenario.settings().grace
    first, *others = table.names
    table.contribute(first)
    table.elapse(grace - 0.8)
    assert table.asked_early() == []
    table.elapse(0.8)
    assert sorted(table.asked_early()) == sorted(others)
