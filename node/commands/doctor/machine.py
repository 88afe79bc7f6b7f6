"""Check this machine: device, key, memory, disk. Limits of a container (cgroup version 2) count too.

A process is in a cgroup within other cgroups; the smallest of their limits applies.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from node.commands.doctor.findings import Finding, finding_of_error, judge_free_space, judge_microbatch
from node.daemon.run_limits import STORE_EXTRA_BYTES, STORE_STATES, peer_bytes, trainer_bytes
from node.daemon.state.outer_state import state_bytes
from node.from_manifest import build_node_program
from node.model import shape_table, smallest_cut
from node.model.memory_estimate import PROCESS_BYTES
from node.trainer.devices.device import choose_device, device_name
from node.units import format_bytes
from protocol.errors import MurmurError
from protocol.identity import Identity
from protocol.manifest.run import Manifest

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def cgroup_memory_left(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> int | None:
    """Return the bytes of main memory left below the limit; `None` without a limit."""
    found = (_group_memory_left(folder) for folder in _own_groups(root, own))
    return min((left for left in found if left is not None), default=None)


def cgroup_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> float | None:
    """Return the number of CPU cores that the cgroup allows; `None` without a limit."""
    found = (_group_cores(folder) for folder in _own_groups(root, own))
    return min((cores for cores in found if cores is not None), default=None)


def _own_groups(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folder of our own cgroup and those around it; inside a container only the root is visible."""
    lines = _read_words(own)
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    innermost = root / path
    yield from (folder for folder in (innermost, *innermost.parents) if folder == root or root in folder.parents)


def _group_memory_left(folder: Path) -> int | None:
    """Return the bytes left in this cgroup; cached files count as free, because the kernel evicts them first."""
    limit, used = _read_words(folder / "memory.max"), _read_words(folder / "memory.current")
    if not (limit and used and limit[0].isdecimal() and used[0].isdecimal()):
        return None
    stat = _read_words(folder / "memory.stat")
    cached = next((int(value) for key, value in zip(stat, stat[1:], strict=False) if key == "inactive_file"), 0)
    return max(0, int(limit[0]) - max(0, int(used[0]) - cached))


def _group_cores(folder: Path) -> float | None:
    """Return the cores of `cpu.max`: `200000 100000` is 200 ms of CPU time in each 100 ms, `max 100000` no limit."""
    words = _read_words(folder / "cpu.max")
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    return int(words[0]) / int(words[1])


def _read_words(path: Path) -> list[str]:
    """Return the words of a file; none if it does not exist, which means no limit."""
    try:
        return path.read_text().split()
    except OSError:
        return []


DAEMON_BASE_BYTES = 1_000_000_000  # daemon and p2pd without a model


def check_device() -> Finding:
    """Check for an accelerator."""
    chosen = choose_device("auto")
    cores = float(len(os.sched_getaffinity(0)))
    cores = min(cores, cgroup_cores() or cores)
    if chosen.type == "cpu":
        found = f"no accelerator, {cores:.3g} cores"
        return Finding("device", "warn", found, "trains, but slowly; install a CUDA torch")
    free, total = torch.cuda.mem_get_info()
    found = f"{device_name(chosen)}, {format_bytes(free)} of {format_bytes(total)} free"
    cards = torch.cuda.device_count()
    return Finding("device", "ok", found if cards < 2 else f"{found}; {cards} cards: --device all takes all of them")


def check_key(path: Path) -> Finding:
    """Check that the node's key is readable, and report its peer id."""
    if not path.exists():
        return Finding("key", "ok", "none yet; created at the first join")
    try:
        return Finding("key", "ok", Identity.load_or_create(path).peer_id)
    except MurmurError as error:
        return finding_of_error("key", error)


def check_memory_and_disk(manifest: Manifest, node_dir: Path, smaller: str) -> list[Finding]:
    """Compare device memory, main memory and disk space with the needs of the run; `smaller` says how to need less."""
    parameters = shape_table(manifest.model, smallest_cut(manifest)).numel
    kind = choose_device("auto").type
    planner = build_node_program(manifest, None, cut=smallest_cut(manifest))
    cut = smallest_cut(manifest)
    main = DAEMON_BASE_BYTES + PROCESS_BYTES + peer_bytes(manifest, planner, kind, cut)
    on_cpu = trainer_bytes(manifest, planner, free_memory() - DAEMON_BASE_BYTES, cut)
    free = torch.cuda.mem_get_info()[0] if kind == "cuda" else on_cpu
    disk = STORE_STATES * state_bytes(parameters, planner.method) + STORE_EXTRA_BYTES
    existing = next(parent for parent in (node_dir, *node_dir.absolute().parents) if parent.exists())
    cards = max(1, torch.cuda.device_count()) if kind == "cuda" else 1
    microbatch = [] if manifest.model.is_custom else [judge_microbatch(manifest, free, kind, cards)]
    return [
        *microbatch,
        judge_free_space("memory", free_memory(), main, f"{smaller}close other programs, or use a machine with more"),
        judge_free_space("disk", shutil.disk_usage(existing).free, disk, "free some space, or choose another --dir"),
    ]


def free_memory() -> int:
    """Return the available bytes of main memory, of the machine and of the container if there is one."""
    free, left = _machine_free_memory(), cgroup_memory_left()
    return free if left is None else min(free, left)


def _machine_free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
