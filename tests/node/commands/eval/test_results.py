"""The file of results: what one process adds, another reads, also beside damaged lines."""

from pathlib import Path

import pytest

from node.commands.eval.results import RESULTS_FILE, Result, append_results, newest_of_each, read_results
from protocol.errors import StorageError

LOSS = Result(time=1.0, round=4, tokens=800, task="validation", metric="loss", value=2.5, standard_error=0.1, samples=9)
LATER = LOSS.model_copy(update={"time": 2.0, "round": 8, "value": 2.25})
QUIZ = Result(time=3.0, task="quiz", metric="acc", value=0.5)


def test_results_are_read_as_they_were_added(tmp_path: Path) -> None:
    assert read_results(tmp_path) == ()
    append_results(tmp_path, [LOSS])
    append_results(tmp_path, [LATER, QUIZ])
    assert read_results(tmp_path) == (LOSS, LATER, QUIZ)
    assert newest_of_each(read_results(tmp_path)) == [LATER, QUIZ]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    damaged = [
        b"",
        b"[]",
        b"{",
        b'{"time": 1}',
        b"\xff",
        b'{"time":1,"task":"a","metric":"b","value":NaN}',
        b"[" * 9000,
    ]
    lines = [LOSS.model_dump_json().encode(), *damaged, QUIZ.model_dump_json().encode(), b'{"time": 3.0, "rou']
    (tmp_path / RESULTS_FILE).write_bytes(b"\n".join(lines))
    assert read_results(tmp_path) == (LOSS, QUIZ)


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=RESULTS_FILE):
        append_results(tmp_path / "absent", [LOSS])
