"""Rewards are measured by questions that no update asks, and a run ends once its newest rewards are high enough."""

import itertools

from benchmarks.rl import GOAL, NEWEST, Learned, asked, held_out_prompts
from benchmarks.rl_swarm import QUESTIONS, held_out_questions, make_manifest
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
    assert not Learned(rewards=[1.0] * (NEWEST - 1)).has_reached
    assert not Learned(rewards=[0.0] * NEWEST + [1.0]).has_reached
    assert Learned(rewards=[0.0] * NEWEST + [GOAL] * NEWEST).has_reached


def test_manifest_of_processes_fits_its_longest_question() -> None:
    for task in ("reverse", "brackets"):
        rl = require_rl(manifest := make_manifest(task, 0, "frugal"))
        questions = (TASKS[task].question("run", number) for number in range(300))
        longest = max((len(each.prompt), len(TASKS[task].right_answer(each)) + 1) for each in questions)
        assert longest[0] + rl.answer_tokens <= manifest.model.context and longest[1] <= rl.answer_tokens
