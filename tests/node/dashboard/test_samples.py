"""Samples of the newest model, made in a process of its own."""

import asyncio
import logging
import math
import re
from pathlib import Path

import pytest

from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, save
from node.dashboard.event_log import EventLog, read_events
from node.dashboard.events import LogOpened, SampleGenerated
from node.dashboard.json_views import snapshot
from node.dashboard.samples import __main__ as process
from node.dashboard.samples import sampler as module
from node.dashboard.samples.__main__ import FIXED_PROMPT, FIXED_QUESTION, choose_prompt, first_words
from node.dashboard.samples.sampler import (
    LAST_SAMPLE_SECONDS,
    SAMPLE_SECONDS,
    YOUNG_SAMPLE_SECONDS,
    Sampler,
    generate_sample,
    is_sample_due,
)
from node.model import initial_weights, shape_table
from node.paths import find_newest_model
from protocol.errors import CheckpointError, MurmurError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection
from tests.node.dashboard.example_events import FACTS, apply_all, opening_events
from tests.node.data.chats import write_talks


def write_node(folder: Path, rounds: int) -> Path:
    """Write a node's folder with a checkpoint of a model of bytes."""
    sizes = {"vocabulary": 256, "width": 16, "layers": 1, "heads": 2, "hidden": 16, "context": 8}
    run = Manifest.model_validate(
        {
            "run": {"name": "test"},
            "model": sizes,
            "data": {"source": "text", "path": "book.txt"},
            "train": {"batch_tokens": 8, "learning_rate": 0.1},
            "method": {"recipe": "diloco"},
        }
    )
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(run.to_toml())
    shapes = shape_table(run.model)
    checkpoint = Checkpoint(
        run.run_id, shapes.hash(), rounds, bytes(32), SavedChain({}, b""), initial_weights(run.model, 0), {}, {}, {}
    )
    save(folder / "checkpoints", checkpoint, shapes, keep=1)
    return folder


def test_sample_is_due_for_a_new_model_after_a_while() -> None:
    assert is_sample_due(1, None, math.inf, is_over=False)
    assert is_sample_due(9, 7, SAMPLE_SECONDS, is_over=False)
    assert not is_sample_due(9, 7, SAMPLE_SECONDS - 1, is_over=False)
    assert is_sample_due(14, 7, YOUNG_SAMPLE_SECONDS, is_over=False), "a young model changes quickly"
    assert not is_sample_due(14, 7, YOUNG_SAMPLE_SECONDS - 1, is_over=False)
    assert is_sample_due(9, 7, LAST_SAMPLE_SECONDS, is_over=True)
    assert not is_sample_due(9, 9, math.inf, is_over=True), "the model has not changed"
    assert not is_sample_due(None, None, math.inf, is_over=False), "there is no model"


def test_newest_model_of_several_folders_is_found(tmp_path: Path) -> None:
    assert find_newest_model([tmp_path / "none"]) is None
    older, newer = write_node(tmp_path / "a", 9), write_node(tmp_path / "b", 12)
    assert find_newest_model([tmp_path / "none", newer, older]) == (12, newer)


def test_prompt_is_held_out_text_if_it_is_at_hand(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("training text\n" * 1000 + "the end of the book, which is held out\n" * 30)
    book = DataSection(source="text", path="book.txt")
    assert choose_prompt(book, tmp_path) == "the end of the book, which is held out"
    assert choose_prompt(book, tmp_path / "elsewhere") == FIXED_PROMPT
    assert choose_prompt(DataSection(source="hf", path="someone/books"), tmp_path) == FIXED_PROMPT
    assert len(choose_prompt(DataSection(source="python-stdlib"), tmp_path).split()) > 1
    assert first_words("red \x1b[31m text") == "red \ufffd[31m text"
    assert first_words("\n\nx\n" + "long words " * 20) == "long words long words long words long words"


def test_model_larger_than_the_free_memory_is_not_loaded(tmp_path: Path) -> None:
    folder = write_node(tmp_path / "node", 1)
    process.require_memory(folder, 1 << 30)
    with pytest.raises(CheckpointError, match="too large for the free memory"):
        process.require_memory(folder, 1000)


@pytest.mark.slow
async def test_sample_is_recorded_and_replayed(tmp_path: Path) -> None:
    folder, events = write_node(tmp_path / "node", 7), tmp_path / "events.jsonl"
    (tmp_path / "book.txt").write_text("one two three\n")
    event_log = EventLog.open(events, LogOpened(at=1.0, facts=FACTS))
    sampler = Sampler([folder], tmp_path, event_log)
    await sampler.sample_if_due()
    sample = event_log.state.sample
    assert sample is not None and sample.round == 7 and sample.text
    await sampler.sample_if_due()
    assert event_log.state.index == 2, "the same model is not sampled again"
    write_node(folder, 8)
    await sampler.sample_now()
    newer = event_log.state.sample
    assert newer is not None and (newer.round, newer.prompt) == (8, sample.prompt), "the prompt stays the same"
    event_log.close()
    assert snapshot(apply_all(read_events(events)), 2.0)["sample"]["round"] == 8


@pytest.mark.slow
async def test_slow_or_failing_process_ends_at_its_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_node(tmp_path / "node", 7)
    with pytest.raises(MurmurError, match="took longer than"):
        await generate_sample(folder, tmp_path, None, seconds=0.01)
    (folder / "run.toml").write_text("not a manifest")
    event_log = EventLog(None, opening_events())
    sampler = Sampler([folder], tmp_path, event_log)
    with caplog.at_level(logging.WARNING):
        await sampler.sample_now()
        await sampler.sample_now()
    assert event_log.state.sample is None
    assert len([record for record in caplog.records if "no sample of the model" in record.message]) == 1


async def test_failed_start_of_the_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(MurmurError, match="Resource temporarily unavailable"):
        await module.generate_sample(tmp_path, tmp_path, None)


def test_older_event_logs_have_no_sample() -> None:
    assert snapshot(apply_all(opening_events()), 1.0)["sample"] is None
    sampled = SampleGenerated(at=1.0, round=3, prompt="a", text="b")
    assert snapshot(apply_all([*opening_events(), sampled]), 1.0)["sample"] == {
        "at": 1.0, "round": 3, "prompt": "a", "text": "b"
    }  # fmt: skip


def test_conversations_are_sampled_by_a_held_out_question(tmp_path: Path) -> None:
    write_talks(tmp_path / "talks.jsonl", 40)
    values = {"source": "text", "path": "talks.jsonl", "validation_share": 0.2, "chat": {}}
    question = choose_prompt(DataSection.model_validate(values), tmp_path)
    assert re.fullmatch(r"after \d+", question)
    assert question == choose_prompt(DataSection.model_validate(values), tmp_path), "always the same"
    assert choose_prompt(DataSection.model_validate(values), tmp_path / "elsewhere") == FIXED_QUESTION
    assert choose_prompt(DataSection.model_validate(values | {"source": "hf"}), tmp_path) == FIXED_QUESTION
