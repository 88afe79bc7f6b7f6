"""The journal on disk."""

import resource
import signal
from pathlib import Path

import pytest

from node.dashboard.event_log import EventFile, read_events, whole_lines_size
from protocol.errors import DataError, MissingFileError, StorageError
from tests.node.dashboard.example_events import committed, opening_events


def write(path: Path, count: int) -> None:
    journal = EventFile.open(path)
    for event in [*opening_events(), *(committed(number) for number in range(count))]:
        journal.append(event)
    journal.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "events.jsonl", 4)
    assert list(read_events(tmp_path / "deep" / "events.jsonl")) == [*opening_events(), *map(committed, range(4))]


@pytest.mark.parametrize("cut", range(1, 400, 37))
def test_a_torn_last_line_is_cut_off_and_the_next_start_goes_on(tmp_path: Path, cut: int) -> None:
    """The control: appended to as it is, the torn line and the next would become one that nobody can read."""
    path = tmp_path / "events.jsonl"
    write(path, 2)
    whole = path.read_bytes()
    torn = whole[: len(whole) - cut]
    path.write_bytes(torn)
    kept = torn[: torn.rfind(b"\n") + 1].count(b"\n")
    assert len(list(read_events(path))) == kept == torn[: whole_lines_size(path)].count(b"\n")
    journal = EventFile.open(path)
    journal.append(committed(7))
    journal.close()
    assert list(read_events(path))[kept:] == [committed(7)]
    path.write_bytes(torn + committed(7).model_dump_json().encode() + b"\n")
    with pytest.raises(DataError, match="line"):
        list(read_events(path))


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"kind": "joined"}\n')
    with pytest.raises(DataError, match=r"a, line 1 is no event of `murmur host`"):
        list(read_events(tmp_path / "a"))
    (tmp_path / "b").write_bytes(b"x" * (3 << 20))
    with pytest.raises(DataError, match="an event has at most"):
        list(read_events(tmp_path / "b"))
    with pytest.raises(MissingFileError, match="name a journal"):
        list(read_events(tmp_path / "c"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="choose another --dir"):
        EventFile.open(tmp_path / "file" / "events.jsonl")


def test_a_full_disk_is_told_and_leaves_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 1)
    before = path.stat().st_size
    journal = EventFile.open(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 40, limits[1]))
    try:
        with pytest.raises(StorageError, match="free some space"):
            journal.append(committed(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        journal.close()
    assert list(read_events(path)) == [*opening_events(), committed(0)]
