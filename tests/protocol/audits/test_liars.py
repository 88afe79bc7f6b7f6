"""Liars in audits: however they use the draw, no honest key is excluded, and whoever lies is found."""

from statistics import mean

import pytest

from tests.protocol.audits.court import Accusations, Court
from tests.slices import sliced

SWARMS = [(20, 2), (20, 6), (50, 5), (50, 16)]


def word_of_two(voters: int) -> int:
    """Stand for the rule before: two of a panel exclude a key."""
    return min(2, voters)


@pytest.mark.parametrize("accuse", ["always", "together"])
@pytest.mark.parametrize(("peers", "liars"), SWARMS)
def test_liars_that_accuse_honest_peers_exclude_only_themselves(peers: int, liars: int, accuse: Accusations) -> None:
    """They work honestly, so that nothing but their findings can be held against them."""
    court = Court(peers, liars, accuse=accuse, lazy=False)
    court.run(150)
    assert court.excluded_honest == set()
    assert court.found.keys() == court.lying or accuse == "together"
    assert all(judge.conduct.excluded == court.found.keys() for judge in court.judges.values())


@pytest.mark.slow
@pytest.mark.parametrize(("peers", "liars"), sliced(SWARMS, 2))
@pytest.mark.parametrize("accuse", sliced(["together", "always", "never"], 1))
def test_1000_rounds_exclude_no_honest_key_and_every_liar(peers: int, liars: int, accuse: Accusations) -> None:
    court = Court(peers, liars, accuse=accuse, seed=1)
    court.run(1000)
    assert court.excluded_honest == set()
    assert court.found.keys() == court.lying


@pytest.mark.parametrize(("peers", "liars"), SWARMS)
def test_control_the_word_of_two_excludes_honest_keys(peers: int, liars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.audit_tracker.votes_to_convict", word_of_two)
    court = Court(peers, liars, accuse="together", lazy=False)
    court.run(150)
    assert court.excluded_honest


def test_lazy_peers_that_answer_for_one_another_are_found_as_soon_as_by_the_word_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mean_round() -> float:
        courts = [Court(20, 6, accuse="never", seed=seed) for seed in range(4)]
        for court in courts:
            court.run(100)
        assert all(court.found.keys() >= court.lying for court in courts)
        return mean(court.found[liar] for court in courts for liar in court.lying)

    now = mean_round()
    monkeypatch.setattr("protocol.audit_tracker.votes_to_convict", word_of_two)
    assert now < 1.1 * mean_round()
