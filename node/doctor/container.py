"""What a container, or any other cgroup (version 2), leaves of the machine: the narrowest bound on the way up."""

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def cgroup_memory_left(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> int | None:
    """Bytes of main memory until the bound; None where there is none."""
    found = (_group_memory_left(folder) for folder in _own_groups(root, own))
    return min((left for left in found if left is not None), default=None)


def cgroup_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> float | None:
    """Of the processor's time; None where all of it may be had."""
    found = (_group_cores(folder) for folder in _own_groups(root, own))
    return min((cores for cores in found if cores is not None), default=None)


def _own_groups(root: Path, own: Path) -> Iterator[Path]:
    """Our own group's folder and those around it. Inside a container, the root is all that there is to see of them."""
    lines = _read_words(own)
    place = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    inner = root / place
    yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)


def _group_memory_left(folder: Path) -> int | None:
    """What is used includes cached files, and those are given up first."""
    most, used = _read_words(folder / "memory.max"), _read_words(folder / "memory.current")
    if not (most and used and most[0].isdecimal() and used[0].isdecimal()):
        return None
    kept = _read_words(folder / "memory.stat")
    cached = next((int(value) for key, value in zip(kept, kept[1:], strict=False) if key == "inactive_file"), 0)
    return max(0, int(most[0]) - max(0, int(used[0]) - cached))


def _group_cores(folder: Path) -> float | None:
    """`200000 100000`: of each 100 ms, 200 may be used; `max 100000`: all."""
    words = _read_words(folder / "cpu.max")
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    return int(words[0]) / int(words[1])


def _read_words(path: Path) -> list[str]:
    """None of a file that is not there: then nothing is bounded by it."""
    try:
        return path.read_text().split()
    except OSError:
        return []
