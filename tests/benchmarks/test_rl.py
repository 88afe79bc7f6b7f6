"""Rewards are measured by questions that no update asks, and a run ends once its newest rewards are high enough."""

import itertools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import rl_swarm
from benchmarks.demonstrations import answers_with_errors
from benchmarks.rl import (
    GOAL,
    MODEL,
    NEWEST,
    Learned,
    asked,
    copy_of,
    held_out_prompts,
    is_refused,
    parts_by_peer,
    take_mean,
)
from benchmarks.rl_swarm import FAULT_ROUNDS, QUESTIONS, SURE, Flight, held_out_questions, make_manifest
from benchmarks.rl_swarm import GOAL as PROMISE
from benchmarks.rl_swarm import NEWEST as ROUNDS
from node.data.chat import ChatEncoder, open_encoder
from node.data.corpus import UNCOUNTED
from node.data.questions import RIGHT_ANSWERS, QuestionEncoder
from node.model import build_model, initial_weights
from node.trainer.reinforcement import HONEST_TIMES
from optim.rollouts import SumTest
from protocol.rollout_groups import require_rl
from protocol.scored_tasks import TASKS


def test_questions_that_were_asked_are_not_held_out() -> None:
    known = {TASKS["brackets"].question("run held out", number).prompt for number in range(0, 400, 2)}
    found = held_out_questions("brackets", "run", known)
    assert len(found) == QUESTIONS and not known & {question.prompt for question in found}


def test_updates_ask_nothing_that_is_held_out() -> None:
    kept = held_out_prompts("brackets", "run")
    assert not kept & {question.prompt for question in itertools.islice(asked("brackets", "run"), 3000)}


def test_one_good_update_is_not_the_goal() -> None:
    assert not Learned(rewards=[1.0] * (NEWEST - 1)).has_reached(GOAL)
    assert not Learned(rewards=[0.0] * NEWEST + [1.0]).has_reached(GOAL)
    assert Learned(rewards=[0.0] * NEWEST + [GOAL] * NEWEST).has_reached(GOAL)


def test_manifest_of_processes_fits_its_longest_question() -> None:
    for task in ("reverse", "brackets"):
        rl = require_rl(manifest := make_manifest(task, 0, "frugal"))
        questions = (TASKS[task].question("run", number) for number in range(300))
        longest = max((len(each.prompt), len(TASKS[task].right_answer(each)) + 1) for each in questions)
        assert longest[0] + rl.answer_tokens <= manifest.model.context and longest[1] <= rl.answer_tokens


def test_both_roles_die_once_and_only_then_the_goal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()

    def peer(name: str) -> SimpleNamespace:
        def started(_: object) -> None:
            events.append(f"{name} starts")

        return SimpleNamespace(name=name, start=started, public_addresses=list)

    peers = [peer(name) for name in ("trainer", "one", "two", "three")]
    swarm = SimpleNamespace(
        peers=peers,
        lab_peers=peers,
        kill_peer=lambda each: events.append(f"{each.name} dies"),
        manifest=make_manifest("brackets", 0, "frugal"),
    )
    monkeypatch.setattr(rl_swarm, "AWAY_SECONDS", 0.0)
    flight = Flight(cast(Any, swarm), 1.0)
    for number in range(2 * FAULT_ROUNDS + ROUNDS):
        assert not flight._has_reached() or number >= 2 * FAULT_ROUNDS
        flight.curve[str(number)] = PROMISE + SURE
        flight._kill_in_time()
    assert events == ["three dies", "three starts", "trainer dies", "trainer starts"]
    assert flight._has_reached()
    flight.curve["99"] = 0.0
    assert not flight._has_reached()


@pytest.mark.parametrize("task", ["reverse", "brackets"])
def test_answers_with_errors_have_the_score_and_prefer_the_right_letter(task: str) -> None:
    found = list(itertools.islice(answers_with_errors(task, "run", 0.4), 1000))
    assert statistics.fmean(TASKS[task].score(*each) for each in found) == pytest.approx(0.4, abs=0.02)
    letter = TASKS[task].right_answer(found[0][0])[0]
    first = [answer[0] for question, answer in found if TASKS[task].right_answer(question)[0] == letter]
    assert statistics.mode(first) == letter


def test_prompts_of_scores_are_those_of_the_warm_up(tmp_path: Path) -> None:
    manifest = make_manifest("reverse", 0, "frugal")
    rl_swarm.write_errors(tmp_path, "reverse")
    row, encoder = (tmp_path / rl_swarm.ERRING).read_text().splitlines()[0], open_encoder(manifest.data, tmp_path)
    question, answer = next(answers_with_errors("reverse", RIGHT_ANSWERS, rl_swarm.ERRING_SCORE))
    assert isinstance(encoder, ChatEncoder)
    tokens = encoder.encode(json.dumps(json.loads(row)["messages"]))
    counted = [int(token) for token in tokens if token < UNCOUNTED]
    asking = [int(token % UNCOUNTED) for token in tokens if token >= UNCOUNTED]
    assert asking == QuestionEncoder(manifest, tmp_path).prompt(question)
    assert bytes(counted).decode() == f"{answer}\n"


def test_trainers_take_the_mean_of_their_weights_and_an_old_policy_draws() -> None:
    model = build_model(MODEL)
    model.load_flat(initial_weights(MODEL, 0))
    other = copy_of(model)
    other.load_flat(other.flat + 2.0)
    take_mean([model, other])
    expected = initial_weights(MODEL, 0) + 1.0
    for each in (model, other, copy_of(model)):
        torch.testing.assert_close(torch.cat([part.flatten() for part in each.parameters()]), expected)


def test_a_lower_temperature_is_refused_on_other_devices_and_bf16_is_not() -> None:
    model = build_model(MODEL)
    model.load_flat(initial_weights(MODEL, 0))
    [honest], [cold] = (
        list(parts_by_peer(kind, "brackets", model, model, range(1))) for kind in ("honest, bf16", "temperature 0.7")
    )
    test = SumTest.calibrate(torch.cat(honest), HONEST_TIMES)
    assert not is_refused(honest, test)
    assert is_refused(cold, test)
