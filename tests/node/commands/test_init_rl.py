"""`murmur init --rl TASK` writes a run that learns right answers first, and then from scores."""

from pathlib import Path

import pytest

from node.commands.init import InitOptions, init
from node.data.questions import QuestionEncoder
from node.data.source import open_corpus
from node.from_manifest import build_program
from node.own_modules import VARIABLE, find_module
from node.run_file import load_run_file
from protocol.errors import ComponentError, UsageError
from protocol.manifest.reading import load_manifest
from protocol.rollout_groups import require_rl
from protocol.scored_tasks import TASKS

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_task.py"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.parametrize("task", TASKS)
def test_run_of_each_task_fits_its_context(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run.toml"
    init(target, InitOptions(rl=task, size="tiny"), ask=False)
    printed = capsys.readouterr().out
    assert f"murmur host {target} --train\n" in printed and "--role rollout" in printed and "murmur up" not in printed
    manifest = load_manifest(target)
    rl = require_rl(manifest)
    assert (manifest.data.source, manifest.data.path, rl.task) == ("questions", task, task)
    assert not rl.has_begun(rl.start_round - 1)
    before, after = (manifest.rate_factor(rounds, 0) for rounds in (rl.start_round - 1, rl.start_round))
    assert (before, after) == (1.0, 0.25)
    program = build_program(manifest)
    codecs = [program.plan(rounds).method.codec.kind for rounds in (rl.start_round - 1, rl.start_round)]
    assert codecs == ["int8", "topk"], "rollout peers begin with the weights of the trainers"
    encoder = QuestionEncoder(manifest, tmp_path)
    questions = [TASKS[task].question("run", number) for number in range(100)]
    assert max(len(encoder.prompt(each)) for each in questions) + rl.answer_tokens <= manifest.model.context
    answers = [f"{TASKS[task].right_answer(each)}\n".encode() for each in questions]
    assert max(map(len, answers)) <= rl.answer_tokens
    assert open_corpus(manifest.data, tmp_path).vocabulary_size == 256


def test_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write one of reverse"):
        init(tmp_path / "run.toml", InitOptions(rl="poems"), ask=False)


def write_task(folder: Path, name: str, *changes: tuple[str, str]) -> str:
    """Write the example with other words into a file of this name; returns the path."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(text)
    return str(folder / f"{name}.py")


def test_task_of_ones_own_is_a_run_whose_commands_allow_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = (
        write_task(tmp_path, "own_letters", ("vowels, not", "vowels, and by no means " + "x" * 30)),
        tmp_path / "r.toml",
    )
    init(target, InitOptions(rl=file, size="tiny"), ask=False)
    commands = [line for line in capsys.readouterr().out.splitlines() if "murmur host" in line or "murmur join" in line]
    assert len(commands) == 3 and all(line.endswith(f" --import {file}") for line in commands)
    manifest = load_run_file(target).manifest
    assert manifest.method.modules == (find_module(file).line,)
    assert (manifest.data.source, manifest.data.path, require_rl(manifest).task) == ("questions", "vowels", "vowels")
    assert manifest.model.context == 128, "room for longer questions"
    assert open_corpus(manifest.data, tmp_path, manifest.method.modules).vocabulary_size == 256
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ComponentError, match="add --import own_letters.py"):
        load_run_file(target)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("own_wrong", ("return sum", "return 0.5 * sum"), "a right answer has 0.5"),
        ("own_none", ("class Vowels(ScoredTask)", "class Vowels"), "has 0 tasks"),
        ("own_syntax", ("def make", "def def make"), "cannot be imported: SyntaxError"),
        ("own_long", ("vowels, not", "vowels" + "x" * 2000), "too long for the model"),
    ],
)
def test_file_without_a_sound_task_is_refused_before_a_run_is_written(
    name: str, change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises((UsageError, ComponentError), match=message):
        init(tmp_path / "run.toml", InitOptions(rl=write_task(tmp_path, name, change), size="tiny"), ask=False)
    assert not (tmp_path / "run.toml").exists()


def test_task_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file mine.py; write the Python file of your task"):
        init(tmp_path / "run.toml", InitOptions(rl="mine.py"), ask=False)
