"""`murmur init --rl TASK` writes a run that learns right answers first, and then from scores."""

from pathlib import Path

import pytest

from node.commands.init import InitOptions, init
from node.data.questions import QuestionEncoder
from node.data.source import open_corpus
from protocol.errors import UsageError
from protocol.manifest.reading import load_manifest
from protocol.rollout_groups import require_rl
from protocol.scored_tasks import TASKS


@pytest.mark.parametrize("task", TASKS)
def test_run_of_each_task_fits_its_context(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    target = tmp_path / "run.toml"
    init(target, InitOptions(rl=task, size="tiny"), ask=False)
    printed = capsys.readouterr().out
    assert f"murmur host {target} --train\n" in printed and "--role rollout" in printed and "murmur up" not in printed
    manifest = load_manifest(target)
    rl = require_rl(manifest)
    assert (manifest.data.source, manifest.data.path, rl.task) == ("questions", task, task)
    assert not rl.has_begun(rl.start_round - 1)
    before, after = (manifest.rate_factor(rounds, 0) for rounds in (rl.start_round - 1, rl.start_round))
    assert (before, after) == (1.0, 0.5)
    encoder = QuestionEncoder(manifest, tmp_path)
    questions = [TASKS[task].question("run", number) for number in range(100)]
    assert max(len(encoder.prompt(each)) for each in questions) + rl.answer_tokens <= manifest.model.context
    answers = [f"{TASKS[task].right_answer(each)}\n".encode() for each in questions]
    assert max(map(len, answers)) <= rl.answer_tokens
    assert open_corpus(manifest.data, tmp_path).vocabulary_size == 256


def test_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write one of reverse"):
        init(tmp_path / "run.toml", InitOptions(rl="poems"), ask=False)
