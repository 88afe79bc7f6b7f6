"""Questions of scored tasks as tokens: right answers to begin with, prompts, and scores of drawn answers.

The source `questions` has right answers to `DOCUMENTS` questions, of which the answers alone are learned. A question is
one line and its answer another; in a run on conversations they are a message and its answer, by the run's template.
An answer ends with a stop: the token that ends a document, that by which the template ends an answer, or a line's end.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from node.data.chat import ChatEncoder, open_encoder
from node.data.corpus import UNCOUNTED, PackedText, Shard, SourceText, count_held_out
from node.data.tokenizer import TextTokenizer
from node.own_tasks import known_tasks
from protocol.errors import DataError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import SourceSection
from protocol.scored_tasks import Question, ScoredTask

DOCUMENTS: Final = 8192
RIGHT_ANSWERS: Final = "right answers"  # in the place of a run's id, so that no run asks the same questions by number


def open_questions(
    source: SourceSection,
    encoder: TextTokenizer | ChatEncoder,
    validation_share: float,
    tasks: Mapping[str, ScoredTask],
) -> SourceText:
    """Open the right answers of the task `source.path`. Raises DataError."""
    task = tasks.get(source.path)
    if task is None:
        raise DataError(f"data.path {source.path!r} has no questions; write one of {', '.join(tasks)}")
    questions = (task.question(RIGHT_ANSWERS, number) for number in range(DOCUMENTS))
    end = encoder.end
    documents = [np.concatenate([_encode(encoder, task, each), end]).astype(np.uint32) for each in questions]
    held_out = count_held_out(DOCUMENTS, validation_share)
    training, validation = PackedText(documents[:-held_out], end), PackedText(documents[-held_out:], end)
    return SourceText(training, validation, encoder.size, source)


def _encode(encoder: TextTokenizer | ChatEncoder, task: ScoredTask, question: Question) -> Shard:
    """Encode a question with its right answer; the question's tokens have the bit `UNCOUNTED`."""
    answer = task.right_answer(question)
    if isinstance(encoder, ChatEncoder):
        messages = [_message(question), {"role": "assistant", "content": answer}]
        return encoder.encode(json.dumps(messages))
    prompt = encoder.encode(question.prompt).astype(np.uint32)
    return np.concatenate([prompt | np.uint32(UNCOUNTED), encoder.encode(f"{answer}\n").astype(np.uint32)])


def _message(question: Question) -> dict[str, str]:
    return {"role": "user", "content": question.prompt.strip()}


class QuestionEncoder:
    """Prompts and scores of a run, equal at rollout peers and trainers.

    Attributes:
        stops: tokens that end an answer, of which they are part.
        usable: ids that may be drawn, int64, ascending.
        tasks: by name, those of the run's own modules among them.
    """

    def __init__(self, manifest: Manifest, base: Path) -> None:
        self.tasks = known_tasks(manifest.method.modules)
        encoder = open_encoder(manifest.data, base)
        self._chat = encoder if isinstance(encoder, ChatEncoder) else None
        self._tokenizer = encoder.tokenizer if isinstance(encoder, ChatEncoder) else encoder
        self._end_of_answer = self._chat.template.end_of_answer if self._chat else ""
        ends = {int(token) % UNCOUNTED for token in encoder.end}
        ends |= {*self._single(self._end_of_answer), *self._single("\n")}
        own = manifest.model.document_end
        self.stops = frozenset(ends if own is None else {*ends, own})
        ids = self._tokenizer.ids
        self.usable = torch.from_numpy(ids[ids < manifest.model.vocabulary])

    def prompt(self, question: Question) -> list[int]:
        """Encode the text that asks a question."""
        if self._chat is not None:
            return self._chat.prompt([_message(question)])
        return [int(token) for token in self._tokenizer.encode(question.prompt)]

    def text(self, tokens: Sequence[int]) -> str:
        """Decode an answer without the text that ends it."""
        known = (token for token in tokens if token not in self.stops)
        text = "".join(self._tokenizer.decode(known))
        return text.partition(self._end_of_answer)[0] if self._end_of_answer else text

    def score(self, question: Question, tokens: Sequence[int]) -> float:
        """Score an answer from 0 to 1; one that does not end has 0."""
        if not tokens or tokens[-1] not in self.stops:
            return 0.0
        return self.tasks[question.task].score(question, self.text(tokens))

    def _single(self, text: str) -> list[int]:
        """Return the token of a text that is one token; none otherwise."""
        tokens = [int(token) for token in self._tokenizer.encode(text)] if text else []
        return tokens if len(tokens) == 1 else []
