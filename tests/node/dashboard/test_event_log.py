"""The event file on disk."""

import resource
import signal
from pathlib import Path

import pytest

from node.dashboard.event_log import EventFile, read_events, whole_lines_size
from protocol.errors import DataError, MissingFileError, StorageError
from tests.node.dashboard.example_events import committed, opening_events


def write(path: Path, count: int) -> None:
    file = EventFile.open(path)
    for event in [*opening_events(), *(committed(number) for number in range(count))]:
        file.append(event)
    file.close()


def test_written_events_are_read_back(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "events.jsonl", 4)
    assert list(read_events(tmp_path / "deep" / "events.jsonl")) == [*opening_events(), *map(committed, range(4))]


@pytest.mark.parametrize("cut", range(1, 400, 37))
def test_partial_last_line_is_cut_off_at_the_next_start(tmp_path: Path, cut: int) -> None:
    """Control: without the cut, the partial line and the next one become one unreadable line."""
    path = tmp_path / "events.jsonl"
    write(path, 2)
    whole = path.read_bytes()
    torn = whole[: len(whole) - cut]
    path.write_bytes(torn)
    kept = torn[: torn.rfind(b"\n") + 1].count(b"\n")
    assert len(list(read_events(path))) == kept == torn[: whole_lines_size(path)].count(b"\n")
    file = EventFile.open(path)
    file.append(committed(7))
    file.close()
    assert list(read_events(path))[kept:] == [committed(7)]
    path.write_bytes(torn + committed(7).model_dump_json().encode() + b"\n")
    with pytest.raises(DataError, match="line"):
        list(read_events(path))


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"kind": "joined"}\n')
    with pytest.raises(DataError, match=r"a, line 1 is not an event of `murmur host`"):
        list(read_events(tmp_path / "a"))
    (tmp_path / "b").write_bytes(b"x" * (3 << 20))
    with pytest.raises(DataError, match="an event has at most"):
        list(read_events(tmp_path / "b"))
    with pytest.raises(MissingFileError, match="name an event log"):
        list(read_events(tmp_path / "c"))


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="choose another --dir"):
        EventFile.open(tmp_path / "file" / "events.jsonl")


def test_full_disk_is_reported_and_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 1)
    before = path.stat().st_size
    file = EventFile.open(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 40, limits[1]))
    try:
        with pytest.raises(StorageError, match="free some space"):
            file.append(committed(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        file.close()
    assert list(read_events(path)) == [*opening_events(), committed(0)]
