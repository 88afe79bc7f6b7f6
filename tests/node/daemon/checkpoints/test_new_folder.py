"""A folder for a person is filled wherever that person may write, and is never left half full."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from node.daemon.checkpoints.new_folder import INCOMPLETE, fill_folder
from protocol.errors import StorageError, UsageError


def fill(out: Path) -> None:
    with fill_folder(out) as folder:
        (folder / "data").write_text("whole")
        assert (folder / INCOMPLETE).exists()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_new_folder_with_its_parents(tmp_path: Path) -> None:
    fill(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == ["data"]


def test_current_folder_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "real"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "ahead").symlink_to("later")
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path("."), tmp_path / "link", tmp_path / "ahead"):
        fill(out)
    assert names(tmp_path / "here") == names(tmp_path / "real") == names(tmp_path / "later") == ["data"]
    assert (tmp_path / "link").is_symlink()


def test_root_of_a_new_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    fill(tmp_path)
    assert names(tmp_path) == ["data", "lost+found"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.slow
def test_own_folder_in_a_parent_of_someone_else(tmp_path: Path) -> None:
    """The control: a rename to that place, which the parent does not allow."""
    temporary = Path(tempfile.gettempdir())
    for folder in (parent for parent in (tmp_path, *tmp_path.parents) if temporary in parent.parents):
        folder.chmod(folder.stat().st_mode | 0o555)
    (tmp_path / "mine").mkdir()
    os.chown(tmp_path / "mine", 12345, 12345)
    program = (
        "import os, pathlib, sys; from node.daemon.checkpoints.new_folder import fill_folder; os.setuid(12345)\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "with fill_folder(out) as folder: (folder / 'data').write_text('whole')\n"
        "try: out.rename(out.with_name('other'))\n"
        "except PermissionError: print('no rename')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path / "mine")], capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.stderr) == ("no rename\n", "")
    assert names(tmp_path / "mine") == ["data"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a file system")
@pytest.mark.slow
def test_mount_point(tmp_path: Path) -> None:
    """The control: a rename onto it, which the kernel refuses."""
    (tmp_path / "mount").mkdir()
    program = (
        "import pathlib, sys; from node.daemon.checkpoints.new_folder import fill_folder\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "(out.parent / 'whole').mkdir()\n"
        "try: (out.parent / 'whole').rename(out)\n"
        "except OSError as error: print(error.strerror)\n"
        "with fill_folder(out) as folder: (folder / 'data').write_text('whole')\n"
        "print(*(path.name for path in out.iterdir()))\n"
    )
    mount = 'mount -t tmpfs tmpfs "$0" && exec "$1" -P -c "$2" "$0"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", mount, str(tmp_path / "mount"), sys.executable]
    ran = subprocess.run([*command, program], capture_output=True, text=True, timeout=60)
    if "unshare" in ran.stderr or "mount" in ran.stderr:
        pytest.skip(ran.stderr)
    assert (ran.stdout.splitlines(), ran.stderr) == (["Device or resource busy", "data"], "")


def test_folder_with_anything_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("years of work")
    for out in (tmp_path / "full", tmp_path / "full" / "thesis"):
        with pytest.raises(UsageError, match="is not an empty folder; name a new one"):
            fill(out)
    assert names(tmp_path / "full") == ["thesis"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("mine")])
@pytest.mark.parametrize("is_there", [True, False])
def test_failure_leaves_nothing(tmp_path: Path, error: BaseException, is_there: bool) -> None:
    out = tmp_path / "deep" / "out"
    if is_there:
        out.mkdir(parents=True)
    expected = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught, fill_folder(out) as folder:
        (folder / "data").write_text("half")
        (folder / "inner").mkdir()
        (folder / "inner" / "data").write_text("half")
        raise error
    assert sorted(tmp_path.rglob("*")) == ([out.parent, out] if is_there else [])
    if expected is StorageError:
        assert (
            str(caught.value) == f"cannot write {out}: No space left on device; free some space or name another folder"
        )


def test_parent_that_is_a_file_is_blamed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write .*: Not a directory; name another folder$"):
        fill(tmp_path / "file" / "out")


def test_two_processes_do_not_fill_one_folder(tmp_path: Path) -> None:
    with fill_folder(tmp_path / "out") as folder:
        (folder / "data").write_text("mine")
        with pytest.raises(UsageError):
            fill(tmp_path / "out")
    assert names(tmp_path / "out") == ["data"]


@pytest.mark.slow
def test_killed_process_leaves_a_mark(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys; from node.daemon.checkpoints.new_folder import fill_folder\n"
        "with fill_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'data').write_text('half'); os.kill(os.getpid(), 9)\n"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path / "out")], timeout=60, check=False)
    assert ran.returncode == -9 and names(tmp_path / "out") == [INCOMPLETE, "data"]
