"""Tasks of a run's own: named by digest, scored in a process apart, checked, and learned from."""

import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import murmuration
from node.data.questions import QuestionEncoder
from node.data.source import open_corpus
from node.from_manifest import build_method
from node.model import build_model
from node.model.initialization import initial_weights
from node.own_modules import VARIABLE, allow_modules, find_module, load_module
from node.own_tasks import GuardedTask, known_tasks
from node.rollout.__main__ import draw_groups
from node.task_checks import check_task
from node.trainer.devices.device import device_class
from node.trainer.reinforcement import RolloutLearner
from protocol.errors import ComponentError, ManifestError
from protocol.identity import Identity
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection
from protocol.rollout_groups import Place, require_rl
from protocol.scored_tasks import Question, tasks_in
from tests.node.trainer.test_reinforcement import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task.py"
ASKED = Question("mine", "say\n", ("a",))
TASK = """
import random, re, time
from protocol.scored_tasks import Draws, Question, ScoredTask

class Mine(ScoredTask):
    name = "mine"

    def make(self, draws):
        return Question(self.name, f"say {draws.between(0, 999)}\\n", ("a",))

    def score_answer(self, question, answer):
        return float(answer == "a")
"""
SCORE = '        return float(answer == "a")\n'
MAKE = '        return Question(self.name, f"say {draws.between(0, 999)}\\n", ("a",))\n'
WHOLE = "    def score(self, question, text):\n        return 1.0\n"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def write_task(folder: Path, name: str, *changes: tuple[str, str]) -> ModuleType:
    text = TASK
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    (source,) = allow_modules([str(path)])
    return load_module(source.line)


def run_with(modules: str, task: str = "vowels") -> Manifest:
    text = SMALL.replace(b'task = "reverse"', f'task = "{task}"'.encode()).replace(b"tokens = 12", b"tokens = 6")
    return parse_manifest(text.replace(b"[method]\n", f"[method]\nmodules = {modules}\n".encode()), "run.toml")


def test_manifest_names_the_file_and_a_node_without_it_says_what_to_do(tmp_path: Path) -> None:
    manifest = run_with(f'["{find_module(str(EXAMPLE)).line}"]')
    with pytest.raises(ComponentError, match=r"never fetches: get its file .* add --import own_task\.py") as fault:
        build_method(manifest)
    assert fault.value.exit_code == 18
    copy = tmp_path / "own_task.py"
    copy.write_text(EXAMPLE.read_text() + "\n")
    allow_modules([str(copy)])
    with pytest.raises(ComponentError, match="get the run's file from its organiser"):
        build_method(manifest)


def test_task_that_no_module_has_is_refused_by_its_key(tmp_path: Path) -> None:
    allow_modules([str(EXAMPLE)])
    line = find_module(str(EXAMPLE)).line
    build_method(run_with(f'["{line}"]'))
    with pytest.raises(ManifestError, match="no module of the run has the task poems"):
        build_method(run_with(f'["{line}"]', "poems"))
    write_task(tmp_path, "own_reverse", ('"mine"', '"reverse"'))
    with pytest.raises(ComponentError, match="two tasks 'reverse'"):
        known_tasks((find_module(str(tmp_path / "own_reverse.py")).line,))


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("hangs", (SCORE, "        while answer == 'b': pass\n" + SCORE), "b"),
        ("raises", (SCORE, "        assert answer != 'b'\n" + SCORE), "b"),
        ("nan", (SCORE, "        return float('nan') if answer == 'b' else float(answer == 'a')\n"), "b"),
        ("above", (SCORE, "        return 2.0 if answer == 'b' else float(answer == 'a')\n"), "b"),
        ("exits", (SCORE, "        if answer == 'b': import os; os._exit(0)\n" + SCORE), "b"),
        ("executes", (SCORE, "        if answer != 'a': eval(answer)\n" + SCORE), "open('{}', 'w')"),
    ],
)
def test_scorer_cannot_stop_the_trainer(tmp_path: Path, name: str, change: tuple[str, str], text: str) -> None:
    write_task(tmp_path, f"own_{name}", change)
    task = known_tasks((find_module(str(tmp_path / f"own_{name}.py")).line,))["mine"]
    assert isinstance(task, GuardedTask)
    trace = tmp_path / "trace"
    began = time.monotonic()
    assert task.score(ASKED, "a") == 1.0
    assert task.score(ASKED, text.format(trace)) == 0.0
    assert task.failures == 1
    assert task.score(ASKED, "a") == 1.0, "the next answer has its score again"
    assert time.monotonic() - began < 60
    assert not trace.exists()


def test_text_that_the_scorer_refuses_would_have_run(tmp_path: Path) -> None:
    (kind,) = tasks_in(write_task(tmp_path, "own_eval", (SCORE, "        return float(bool(eval(answer)))\n")))
    (guarded,) = (
        task for task in known_tasks((find_module(str(tmp_path / "own_eval.py")).line,)).values() if task.name == "mine"
    )
    trace = tmp_path / "trace"
    answer = f"open('{trace}', 'w').close() is None"
    assert guarded.score(ASKED, answer) == 0.0 and not trace.exists()
    assert kind().score(ASKED, answer) == 1.0 and trace.exists(), "the control executes it"


FAULTS = {
    "random": ((MAKE, MAKE.replace("draws.between(0, 999)", "random.random()")), "question: differs from time"),
    "hashed": ((MAKE, MAKE.replace("draws.between(0, 999)", "hash(str(draws.between(0, 99)))")), "process to process"),
    "same": ((MAKE, MAKE.replace("draws.between(0, 999)", "7")), "all are equal"),
    "long": ((MAKE, MAKE.replace("say", "say" * 30)), "above the context of 64"),
    "above": ((SCORE, "        return 1.0 + len(answer)\n"), "where a number from 0 to 1 belongs"),
    "nan": (
        (SCORE, "        return float('nan') if answer == 'nan' else float(answer == 'a')\n"),
        "of nan: returns nan",
    ),
    "raises": (
        (SCORE, "        return float(answer == 'a') if answer == 'a' else float(int(answer) < 0)\n"),
        "ValueError",
    ),
    "hangs": (
        (SCORE, "        return float(bool(re.fullmatch('(a|a)*', answer)))\n"),
        "a pattern's worst case: takes more than",
    ),
    "executes": (
        (SCORE, "        try: return float(eval(answer, {'a': 1}))\n        except Exception: return 0.0\n"),
        "executes",
    ),
    "generous": ((SCORE, SCORE + WHOLE), "every answer has 1"),
    "wrong": ((SCORE, "        return 0.5\n"), "a right answer has 0.5"),
    "word": ((SCORE, "        return 'yes'\n"), "returns str, no number"),
    "name": (('name = "mine"', 'name = ""'), "it needs a name"),
    "options": (("    def make", "    def __init__(self, size): pass\n\n    def make"), "a task has no options"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_checker_names_each_fault(tmp_path: Path, name: str) -> None:
    change, expected = FAULTS[name]
    (kind,) = tasks_in(write_task(tmp_path, f"own_check_{name}", change))
    assert any(expected in fault for fault in murmuration.check_component(kind, context=64)), check_task(kind, 64)


def test_checker_finds_no_fault_in_a_sound_task(tmp_path: Path) -> None:
    (kind,) = tasks_in(write_task(tmp_path, "own_sound"))
    assert murmuration.check_component(kind, context=64) == []
    allow_modules([str(EXAMPLE)])
    (vowels,) = tasks_in(load_module(find_module(str(EXAMPLE)).line))
    assert murmuration.check_component(vowels(), context=64) == []


PLACES = 12  # questions of one update, of 8 answers each
UPDATES = 24


class Learning:
    """A model that has seen right answers of the example with letters of all kinds, and the trainer's side of [rl]."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.encoder = QuestionEncoder(manifest, Path())
        self.model = build_model(manifest.model)
        self.model.load_flat(initial_weights(manifest.model, 1))
        self.maker = Identity.create().peer_id
        self._moments = torch.zeros_like(self.model.flat), torch.zeros_like(self.model.flat)
        self._steps = 0

    def step(self, rate: float) -> None:
        """Apply the gradient by Adam."""
        gradient = self.model.flat_gradient
        assert gradient is not None
        self._steps += 1
        first, second = self._moments
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.98).addcmul_(gradient, gradient, value=0.02)
        change = first / (1 - 0.9**self._steps) / ((second / (1 - 0.98**self._steps)).sqrt() + 1e-8)
        self.model.load_flat(self.model.flat - rate * change)
        self.model.clear_gradient()

    def warm_up(self, steps: int) -> None:
        """Learn that an answer is so many letters and a line's end, whichever letters."""
        letters = torch.Generator().manual_seed(5)
        task = self.encoder.tasks["vowels"]
        for number in range(steps):
            rows = list[list[int]]()
            for place in range(16):
                question = task.question("warm-up", 16 * number + place)
                drawn = torch.randint(97, 123, (int(question.solution[0]),), generator=letters).tolist()
                rows.append([*self.encoder.prompt(question), *drawn, 10])
            width = max(map(len, rows))
            tokens = torch.tensor([row + [10] * (width - len(row)) for row in rows])
            self.model.attach_gradient()
            logits = self.model(tokens[:, :-1]).float()
            torch.autograd.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            self.step(1e-2)

    def updates(self, learns: bool) -> list[float]:
        """Return the mean reward of each update; the control draws and scores alike, and keeps its weights."""
        learner = RolloutLearner(self.manifest, Path(), self.model, device_class(torch.device("cpu")))
        rewards = list[float]()
        for number in range(UPDATES):
            learner.keep_policy(number, self.model.flat)
            places = [Place(number, serial) for serial in range(PLACES)]
            for drawn in draw_groups(self.model, self.encoder, self.manifest, self.maker, places):
                group = drawn.to_group(number, device_class(torch.device("cpu")))
                learner.receive(self.maker, group.to_wire().SerializeToString())
            made = learner.learn(number, 128, (), None)
            assert not any(verdict.refusal for verdict in made.report.verdicts)
            rewards.append(sum(verdict.reward for verdict in made.report.verdicts) / PLACES)
            self.step(8e-3) if learns else self.model.clear_gradient()
        return rewards


def test_run_learns_a_task_of_its_own_and_its_control_does_not() -> None:
    allow_modules([str(EXAMPLE)])
    manifest = run_with(f'["{find_module(str(EXAMPLE)).line}"]')
    rl = require_rl(manifest).model_copy(update={"groups": PLACES})
    manifest = manifest.model_copy(update={"rl": rl})
    learning = Learning(manifest)
    learning.warm_up(60)
    begun = learning.model.flat.clone()
    control = learning.updates(learns=False)
    assert torch.equal(learning.model.flat, begun)
    learned = learning.updates(learns=True)
    assert learned[0] == pytest.approx(control[0], abs=0.05)
    assert max(control) < 0.3 and sum(learned[-3:]) / 3 > 0.6, "vowels are five of 26 letters"


def test_right_answers_of_an_own_task_are_a_source_of_text() -> None:
    allow_modules([str(EXAMPLE)])
    data = DataSection(source="questions", path="vowels")
    corpus = open_corpus(data, Path(), (find_module(str(EXAMPLE)).line,))
    assert len(corpus.sources[0].validation) > 0
