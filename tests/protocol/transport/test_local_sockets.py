"""The private folder of sockets, its lock, and the cleanup after a killed process."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from protocol.errors import AlreadyRunningError, StorageError
from protocol.transport import local_sockets
from protocol.transport.local_sockets import SocketFolder

pytestmark = pytest.mark.slow


def test_folder_is_private_short_and_removed(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 30) / "node"
    folder = SocketFolder.create(deep)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        with pytest.raises(OSError, match="too long"):  # why sockets are not in the node's own folder
            listener.bind(str(deep / "server.sock"))
        listener.bind(str(folder.path / "p2pclient-0123456789a.sock"))
    folder.remove()
    assert not folder.path.exists()
    assert os.listdir(deep) == []


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder = SocketFolder.create(tmp_path)
    with pytest.raises(AlreadyRunningError, match=f"{tmp_path}; stop it"):
        SocketFolder.create(tmp_path)
    assert folder.path.exists()
    folder.remove()
    SocketFolder.create(tmp_path).remove()


def test_sockets_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib, protocol.transport.local_sockets as s\n"
        "folder = s.SocketFolder.create(pathlib.Path(sys.argv[1]))\n"
        "(folder.path / 'old.sock').touch()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == -9
    left = (tmp_path / "sockets").readlink()
    assert (left / "old.sock").exists()
    folder = SocketFolder.create(tmp_path)
    assert not left.exists()
    folder.remove()


def test_stale_link_never_removes_a_foreign_folder(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "file").mkdir(parents=True)
    for target in (tmp_path / "gone", precious):
        (tmp_path / "sockets").symlink_to(target)
        SocketFolder.create(tmp_path).remove()
    assert (precious / "file").exists()


def test_unusable_path_raises_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot create the socket folder of .*Not a directory; free or open"):
        SocketFolder.create(tmp_path / "file" / "node")


def count_leftovers(root: Path) -> tuple[list[str], int]:
    return os.listdir(root), len(os.listdir("/proc/self/fd"))


def test_copied_folder_is_distinguished_from_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a run's folder may contain a folder in place of the link."""
    root = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    (tmp_path / "sockets").mkdir()
    before = count_leftovers(root)
    with pytest.raises(StorageError, match="sockets is not a link, .*; remove it"):
        SocketFolder.create(tmp_path)
    assert count_leftovers(root) == before
    (tmp_path / "sockets").rmdir()
    SocketFolder.create(tmp_path).remove()
    root.rmdir()


def test_second_process_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    first = SocketFolder.create(tmp_path)
    before = count_leftovers(root)
    monkeypatch.setattr(
        local_sockets, "_remove_stale", lambda link: None
    )  # as if both had checked before either linked
    with pytest.raises(AlreadyRunningError):
        SocketFolder.create(tmp_path)
    assert count_leftovers(root) == before
    first.remove()
    root.rmdir()
