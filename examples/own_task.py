"""A task of one's own: write so many vowels. It has many right answers, which only a score can judge.

    murmur host run.toml --import examples/own_task.py --train

`docs/user/own-task.md` explains it.
"""

from protocol.scored_tasks import Draws, Question, ScoredTask

VOWELS = "aeiou"


class Vowels(ScoredTask):
    """The score is the share of letters that are vowels, of as many as the question asks for."""

    name = "vowels"

    def make(self, draws: Draws) -> Question:
        count = draws.between(2, 5)
        return Question(self.name, f"{count} vowels, not {draws.between(0, 999)}\n", (str(count),))

    def right_answer(self, question: Question) -> str:
        draws = Draws(question.prompt)
        return "".join(VOWELS[draws.between(0, 4)] for _ in range(int(question.solution[0])))

    def score_answer(self, question: Question, answer: str) -> float:
        return sum(letter in VOWELS for letter in answer) / max(int(question.solution[0]), len(answer))
