"""What a container, or any other cgroup (version 2), leaves of the machine: the narrowest bound on the way up.

What a look at this machine tells: device, key, memory, disk.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from node.daemon.outer_state import state_bytes
from node.daemon.replica import STORE_EXTRA_BYTES, STORE_STATES
from node.doctor.findings import Finding, finding_of_error, judge_free_space, judge_microbatch
from node.from_manifest import build_program
from node.model import shape_table
from node.model.memory_estimate import fixed_bytes
from node.trainer.device import choose_device, device_name
from node.units import format_bytes
from protocol.errors import MurmurError
from protocol.identity import Identity
from protocol.manifest import Manifest

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


DAEMON_BYTES_PER_PARAMETER = (
    48  # a parameter, in main memory: anchors, snapshot, outer state, and a round's work on them
)
DAEMON_BASE_BYTES = 1_000_000_000  # of the daemon and p2pd


def check_device() -> Finding:
    chosen = choose_device("auto")
    cores = float(len(os.sched_getaffinity(0)))
    cores = min(cores, cgroup_cores() or cores)
    if chosen.type == "cpu":
        found = f"no accelerator, {cores:.3g} cores"
        return Finding("device", "warn", found, "trains, but slowly; install a CUDA torch")
    free, total = torch.cuda.mem_get_info()
    return Finding("device", "ok", f"{device_name(chosen)}, {format_bytes(free)} of {format_bytes(total)} free")


def check_key(path: Path) -> Finding:
    if not path.exists():
        return Finding("key", "ok", "none yet; made at the first join")
    try:
        return Finding("key", "ok", Identity.load_or_create(path).peer_id)
    except MurmurError as error:
        return finding_of_error("key", error)


def check_memory_and_disk(manifest: Manifest, node_dir: Path) -> list[Finding]:
    """Memory of the device, main memory and disk against what the run needs."""
    parameters = shape_table(manifest.model).numel
    kind = choose_device("auto").type
    daemon = parameters * DAEMON_BYTES_PER_PARAMETER + DAEMON_BASE_BYTES
    main = daemon + fixed_bytes(manifest, kind) if kind == "cpu" else daemon
    free = torch.cuda.mem_get_info()[0] if kind == "cuda" else max(0, free_memory() - daemon)
    disk = STORE_STATES * state_bytes(parameters, build_program(manifest).method) + STORE_EXTRA_BYTES
    existing = next(parent for parent in (node_dir, *node_dir.absolute().parents) if parent.exists())
    return [
        judge_microbatch(manifest, free, kind),
        judge_free_space("memory", free_memory(), main, "close other programs, or use a machine with more"),
        judge_free_space("disk", shutil.disk_usage(existing).free, disk, "free some space, or choose another --dir"),
    ]


def free_memory() -> int:
    """Bytes of main memory that programs can still have here: of the machine, and of the container if this is one."""
    free, left = _machine_free_memory(), cgroup_memory_left()
    return free if left is None else min(free, left)


def _machine_free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
