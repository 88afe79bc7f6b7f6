"""Limits of a container, from text files as the kernel writes them."""

from pathlib import Path

import pytest

from node.commands.doctor.checks import cgroup_cores, cgroup_memory_left

GB = 1_000_000_000


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return /proc/self/cgroup of a process in a container, whose cgroup is the visible root."""
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path / "own"


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_container_with_limits(tmp_path: Path, own: Path) -> None:
    stat = f"anon {GB}\nfile {2 * GB}\ninactive_file {GB // 2}\nactive_file 7\n"
    root = group(
        tmp_path / "cgroup", memory_max=f"{4 * GB}\n", memory_current=f"{3 * GB}\n", memory_stat=stat,
        cpu_max="150000 100000\n",
    )  # fmt: skip
    assert cgroup_memory_left(root, own) == GB + GB // 2
    assert cgroup_cores(root, own) == 1.5


@pytest.mark.parametrize("files", [{}, {"memory_max": "max\n", "memory_current": "5\n", "cpu_max": "max 100000\n"}])
def test_no_limits_without_limit_files(tmp_path: Path, own: Path, files: dict[str, str]) -> None:
    root = group(tmp_path / "cgroup", **files)
    assert cgroup_memory_left(root, own) is None and cgroup_cores(root, own) is None
    assert cgroup_memory_left(tmp_path / "none", tmp_path / "none") is None


def test_nested_cgroup_has_the_smallest_limit(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("1:cpu:/old\n0::/user.slice/session-3.scope\n")
    group(root / "user.slice", memory_max="900\n", memory_current="100\n", cpu_max="400000 100000\n")
    group(root / "user.slice" / "session-3.scope", memory_max="500\n", memory_current="40\n", cpu_max="max 100000\n")
    group(root / "other.slice", memory_max="1\n", memory_current="1\n", cpu_max="1 100000\n")
    assert cgroup_memory_left(root, own) == 460
    assert cgroup_cores(root, own) == 4.0


def test_no_memory_is_left_above_the_limit(tmp_path: Path, own: Path) -> None:
    root = group(tmp_path / "cgroup", memory_max="100\n", memory_current="150\n")
    assert cgroup_memory_left(root, own) == 0
