"""Each defence against its attack in a live swarm, and the same attack with the rule off, which has to succeed.

`python -m tests.hostile all` tries every attack for longer; here the windows are short, and attackers that leave no
trace share a swarm. So the pace may fall further here before a test is red.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from tests.hostile.arena import Arena
from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.scoreboard import RoundLine, Score
from tests.hostile.template import Template
from tests.hostile.trial import Timing, attack_once, attack_until_ruin, open_arena, try_attack, try_control
from tests.slices import sliced

pytestmark = [pytest.mark.hostile, pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(240)]

TIMING = Timing(clean=2.0, after=1.5, control=30.0, share=0.7)  # a control ends with the first harm
PACE_SLACK = 0.2  # of windows of a few seconds on a busy machine
STRANGERS = ("log-flood", "chain-flood", "fresh-keys", "knocking", "announce-only", "state-vote", "invented-history")
MEMBERS = ("invented-contributors", "lying-reducer", "token-claim-at-target")
CONTROLS = ("invented-commits", "token-claim-at-target", "log-flood")
PIPELINES = ("other-inputs", "invented-gradients", "withheld-backwards")
MANIFESTS = ("oversized-manifest", "extreme-manifest")


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    made = Template()
    yield made
    made.close()


@pytest.fixture(scope="module")
def arena(template: Template) -> Iterator[Arena]:
    with open_arena(template, ATTACKS[STRANGERS[0]]) as opened:
        yield opened


def require_defended(attack: Attack, score: Score, min_pace: float) -> None:
    assert not score.is_harmed(min_pace, attack.limits), score
    assert attack.is_counted(score.counters), score


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_do_no_harm_and_are_counted(arena: Arena, name: str) -> None:
    attack = ATTACKS[name]
    min_pace = attack.min_pace - PACE_SLACK
    for _ in range(3):  # if they were only slow, another program may have taken the processors meanwhile
        arena.wait_until_recovered()
        score = attack_once(arena, attack, TIMING)
        if score.pace_ratio >= min_pace:
            break
    require_defended(attack, score, min_pace)


@pytest.mark.parametrize("name", sliced(MEMBERS, 2))
def test_hostile_member_does_no_harm_and_is_counted(template: Template, name: str) -> None:
    """Test the model and the digests; `docs/results/hostile.md` has the pace while such a member leads."""
    require_defended(ATTACKS[name], try_attack(template, ATTACKS[name], TIMING), min_pace=0.0)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_of_hostile_organisers_are_refused(arena: Arena, name: str) -> None:
    attack, timing = ATTACKS[name], replace(TIMING, clean=1.0, after=0.5)
    score = attack_once(arena, attack, timing)
    assert score.facts.keys() >= attack.limits.keys(), score
    assert not score.is_harmed(0.0, attack.limits), score
    assert attack_until_ruin(arena, attack, timing).is_ruined(attack.limits), "the control must succeed"


@pytest.mark.parametrize("name", sliced(CONTROLS, 1))
def test_same_attack_succeeds_with_the_rule_off(template: Template, name: str) -> None:
    attack = ATTACKS[name]
    for _ in range(2):  # a liar that a busy machine has silenced cannot lie
        score = try_control(template, attack, TIMING)
        if score.is_ruined(attack.limits):
            break
    assert score.is_ruined(attack.limits), score


def test_server_that_returns_false_activations_is_excluded_and_no_other(template: Template) -> None:
    attack = ATTACKS["false-activations"]
    with open_arena(template, attack) as arena:
        assert arena.member is not None
        arena.member.switch_on(attack.name)
        arena.wait_until_member_lies(attack.name)
        arena.wait_until(lambda: arena.facts()["trusted"] == 0.0, "its contributions count no more")
        assert arena.counters()["refusals: contradicted"]
        arena.wait_until(lambda: all(is_together(stage) for stage in arena.rounds_by_stage()), "the honest go on")
        assert arena.facts()["trusted"] == 0.0


def is_together(rounds: Mapping[str, Sequence[RoundLine]]) -> bool:
    """Return whether the newest round of each peer of a stage has contributions of all of them, and of nobody else."""
    return all(len(lines[-1].senders[-1]) == len(rounds) for lines in rounds.values())


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*PIPELINES, "void-records", "false-gradients", "exported-model"])
def test_attack_on_a_pipeline_or_a_person_does_no_harm(template: Template, name: str) -> None:
    require_defended(ATTACKS[name], try_attack(template, ATTACKS[name]), min_pace=0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*PIPELINES, "void-records", "false-activations", "exported-model"])
def test_same_attack_on_a_pipeline_or_a_person_succeeds_with_the_rule_off(template: Template, name: str) -> None:
    assert try_control(template, ATTACKS[name]).is_ruined(ATTACKS[name].limits)
