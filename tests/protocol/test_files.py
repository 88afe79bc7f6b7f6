import os
import stat
from pathlib import Path

import pytest

from protocol.errors import StorageError
from protocol.files import create_atomically, write_atomically


def test_failed_write_leaves_the_old_content_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def fail_full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail_full_disk)
    with pytest.raises(StorageError, match="No space left on device; free some"):
        write_atomically(path, b"new")
    with pytest.raises(OSError, match="No space left"):
        create_atomically(tmp_path / "y", b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_file_is_created_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "key"
    create_atomically(path, b"first")
    with pytest.raises(FileExistsError):
        create_atomically(path, b"second")
    assert path.read_bytes() == b"first" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["key"]
