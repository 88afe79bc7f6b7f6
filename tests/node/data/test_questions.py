"""Questions of scored tasks as text to learn from, as prompts, and as answers to score."""

from pathlib import Path

import numpy as np
import pytest

from node.data.corpus import UNCOUNTED
from node.data.questions import QuestionEncoder
from node.data.source import open_corpus
from protocol.errors import DataError
from protocol.manifest.reading import parse_manifest
from protocol.manifest.sections import ChatSection, DataSection
from protocol.scored_tasks import TASKS
from tests.protocol.test_rollouts import RL

TEMPLATE = "{% for m in messages %}<{{ m.content }}>\n{% endfor %}{% if add_generation_prompt %}<{% endif %}"
HERE = Path()


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_have_the_score_one(task: str) -> None:
    questions = [TASKS[task].question("run", number) for number in range(40)]
    assert all(TASKS[task].score(each, TASKS[task].right_answer(each)) == 1.0 for each in questions)


@pytest.mark.parametrize("chat", [None, ChatSection(template=TEMPLATE)])
def test_source_teaches_right_answers_alone(chat: ChatSection | None) -> None:
    corpus = open_corpus(DataSection(source="questions", path="reverse", chat=chat), HERE)
    (source,) = corpus.sources
    window = source.training.windows(64, 1, 0).take(np.arange(1, dtype=np.uint64))[0]
    read = bytes(int(token) % 256 for token in window if token != UNCOUNTED).decode()
    learned = bytes(int(token) for token in window if token < UNCOUNTED).decode()
    question = read.partition("\n")[0].strip("<>")
    word = question.removeprefix("reverse ")
    assert question == f"reverse {word}"
    assert word[::-1] in learned
    assert "reverse" not in learned
    assert len(source.validation) > 0


def test_encoder_scores_answers_that_end() -> None:
    encoder = QuestionEncoder(parse_manifest(RL, "run.toml"), HERE)
    question = TASKS["reverse"].question("run", 0)
    right = [*f"{question.solution[0]}\n".encode()]
    assert bytes(encoder.prompt(question)).decode() == question.prompt
    assert encoder.stops == {10}
    assert encoder.score(question, right) == 1.0
    assert encoder.score(question, right[:-1]) == 0.0
    assert encoder.score(question, []) == 0.0


def test_encoder_of_conversations_asks_by_the_template() -> None:
    manifest = parse_manifest(RL, "run.toml")
    chat = manifest.model_copy(
        update={"data": DataSection(source="questions", path="reverse", chat=ChatSection(template=TEMPLATE))}
    )
    encoder = QuestionEncoder(chat, HERE)
    question = TASKS["reverse"].question("run", 0)
    assert bytes(encoder.prompt(question)).decode() == f"<{question.prompt.strip()}>\n<"
    assert encoder.score(question, [*f"{question.solution[0]}>\n".encode()]) == 1.0


def test_unknown_task_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match="write one of reverse"):
        open_corpus(DataSection(source="questions", path="poems"), HERE)
