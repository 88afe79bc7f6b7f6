"""Who has not offered is asked to before the others' grace ends, once, and only for the sake of whole contributions."""

import pytest

from protocol.identity import PeerId
from protocol.rounds.events import Hurry, Offered, Urgency
from protocol.rounds.round import Round
from tests.protocol.rounds.round_table import BASE, Table
from tests.simulation.network import offer_of, signer_of


class Asked(Table):
    """All machines are asked `reserve` seconds before the grace ends, for the sake of `whole` tokens."""

    reserve, whole = 0.5, 1

    def machine(self, name: PeerId, seen: dict[PeerId, float] | None = None) -> Round:
        settings, urgency = self.scenario.settings(), Urgency(self.reserve, self.whole)
        return Round(settings, name, 0, BASE, signer_of(name), self.now, seen, urgency=lambda number: urgency)

    def hurried(self) -> list[PeerId]:
        return [name for name, action in self.log if isinstance(action, Hurry)]


@pytest.mark.parametrize("exchange", ["gather", "butterfly"])
def test_the_one_that_is_missing_is_asked_once_and_comes_in(exchange: str) -> None:
    table = Asked(3, exchange)  # type: ignore[arg-type]
    grace = table.scenario.settings().grace
    *others, late = table.names
    table.offer(*others)
    table.elapse(grace - 0.8)
    assert table.hurried() == []
    table.elapse(0.4)
    assert table.hurried() == [late]
    table.offer(late)
    table.elapse(grace)
    assert table.hurried() == [late]
    assert table.included() == {tuple(sorted(table.names))}


def test_without_being_asked_it_is_left_out() -> None:
    """The control of the test above."""
    table = Table(3, "gather")
    *others, late = table.names
    table.offer(*others)
    table.elapse(table.scenario.settings().grace + 0.4)
    table.feed(late, Offered(offer_of(late, 0, BASE, table.scenario)))
    table.settle()
    assert table.included() == {tuple(sorted(others))}


def test_nobody_hurries_for_those_who_made_few_steps_themselves() -> None:
    Asked.whole, before = 2**40, Asked.whole
    try:
        table = Asked(3, "gather")
    finally:
        Asked.whole = before
    *others, _ = table.names
    table.offer(*others)
    table.elapse(2 * table.scenario.settings().grace)
    assert table.hurried() == []


def test_who_has_offered_is_not_asked() -> None:
    table = Asked(3, "gather")
    table.offer(table.names[1])
    table.elapse(2 * table.scenario.settings().grace)
    assert table.hurried() == [], "one of three is not yet half"
