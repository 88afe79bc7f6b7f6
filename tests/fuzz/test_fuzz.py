"""A seeded share of the fuzzing, and every frame that was once found."""

import random
from pathlib import Path

import pytest

from protocol.errors import MalformedError
from tests.fuzz import corpus
from tests.fuzz.frames import Target
from tests.fuzz.run import MAX_GROWTH_BYTES, Report, fuzz, run_frame
from tests.fuzz.targets import all_targets

SECONDS, FRAMES, SEED = 20.0, 1_000_000, 20261126


@pytest.mark.slow
def test_no_frame_breaks_a_decoder() -> None:
    report = fuzz(FRAMES, SEED, seconds=SECONDS)
    assert not report.finds, [(find.target, find.reason) for find in report.finds[:5]]
    assert report.growth_bytes < MAX_GROWTH_BYTES
    assert sum(report.frames.values()) > 200
    assert report.refused.total() and report.accepted.total()  # frames reach the checks, and some pass them


@pytest.mark.parametrize(("folder", "path"), corpus.load() or [("", None)])
def test_frames_that_were_found_are_refused_or_taken(folder: str, path: Path | None) -> None:
    if path is None:
        return
    target = next(target for target in all_targets() if corpus.folder_of(target.name) == folder)
    report = Report()
    run_frame(target, path.read_bytes(), report)
    assert not report.finds, report.finds[0].reason


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), AssertionError(), MemoryError()])
def test_other_errors_than_refusals_are_finds(error: Exception) -> None:
    """The control: a decoder that fails in another way, and one that refuses."""

    def decode(raw: bytes) -> None:
        raise error

    def refuse(raw: bytes) -> None:
        raise MalformedError("no")

    report = Report()
    run_frame(Target("broken", lambda draw: b"", decode), b"", report)
    assert [find.target for find in report.finds] == ["broken"]
    run_frame(Target("sound", lambda draw: b"", refuse), b"", report)
    assert len(report.finds) == 1 and report.refused.total() == 1


def test_frames_follow_from_the_seed() -> None:
    target = all_targets()[0]
    assert target.make(random.Random(1)) == target.make(random.Random(1)) != target.make(random.Random(2))
