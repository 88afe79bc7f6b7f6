"""The table of attacks fits the programs of the attackers, the rules and the documentation."""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.scoreboard import RoundLine, Score, Window, are_digests_equal, count_foreign_rounds, pace

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "hostile.md"
ROWS = {"1", "1b", "1c", "1d", *map(str, range(2, 18)), "6b", "6c", "13b", "A", "B", "C", "D", "F"}


def line(time: float, number: int, digest: str = "a") -> RoundLine:
    return RoundLine(time, number, digest, digest, (), 0, 1.0)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_attack_names_a_program_and_rules_that_exist(attack: Attack) -> None:
    from tests.hostile.attackers.equivocation import NAME
    from tests.hostile.attackers.members import LIES, SENT_TWICE
    from tests.hostile.peers import FALSE_RESULTS
    from tests.hostile.rules import RULES

    if attack.stranger:
        module, _, function = attack.stranger.partition(":")
        assert hasattr(importlib.import_module(f"tests.hostile.attackers.{module}"), function)
    if attack.member:
        assert (attack.switch or attack.name) in {*LIES, NAME, SENT_TWICE, *FALSE_RESULTS}
    assert set(attack.rules) <= RULES.keys() | {"room", "manifest-bounds", "proof"}


def test_every_row_of_the_list_has_an_attack() -> None:
    assert {attack.row for attack in ATTACKS.values()} >= ROWS


def test_results_name_every_attack_and_no_other() -> None:
    documented = set(re.findall(r"^\| `([a-z-]+)` ", RESULTS.read_text(), re.MULTILINE))
    assert documented == ATTACKS.keys()


def test_pace_counts_a_cut_round_in_part() -> None:
    rounds = [line(float(second), second) for second in range(10)]
    assert pace(rounds, Window(2.5, 4.75)) == pytest.approx(1.0)
    assert pace(rounds[:4], Window(4.0, 6.0)) == 0.0


def test_digests_differ_where_one_peer_decided_otherwise_or_alone() -> None:
    same, other = [line(1.0, 1), line(2.0, 2)], [line(1.1, 1), line(2.1, 2, "b")]
    window = Window(0.0, 3.0)
    assert are_digests_equal({"a": same, "b": same}, window)
    assert not are_digests_equal({"a": same, "b": other}, window)
    assert not are_digests_equal({"a": same, "b": [line(1.0, 3)]}, window)


def test_round_with_a_contribution_of_a_stranger_is_foreign() -> None:
    rounds = {"a": [replace(line(1.0, 1), senders=(("x",),)), replace(line(2.0, 2), senders=(("x", "y"), ("z",)))]}
    assert count_foreign_rounds(rounds, 0.0, {"x", "y"}) == count_foreign_rounds(rounds, 2.0, {"x", "y"}) == 1
    assert count_foreign_rounds(rounds, 0.0, {"x", "y", "z"}) == count_foreign_rounds(rounds, 2.5, {"x"}) == 0


def test_score_is_harmed_by_loss_pace_digests_foreign_rounds_or_facts() -> None:
    fine = Score(1.0, 1.0, True, {}, {"knocks": 3.0})
    assert not fine.is_harmed(0.9, {"knocks": 3.0}) and not fine.is_ruined({})
    harmed = [Score(1.2, 1.0, True, {}), Score(1.0, 0.4, True, {}), Score(1.0, 1.0, False, {})]
    harmed.append(replace(fine, foreign_rounds=1))
    assert all(score.is_harmed(0.9, {}) and score.is_ruined({}) for score in harmed)
    assert fine.is_harmed(0.9, {"knocks": 2.0}) and fine.is_ruined({"knocks": 1.0})
