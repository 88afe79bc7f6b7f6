"""What a look at this machine tells: device, key, memory, disk."""

import os
import shutil
from pathlib import Path

import torch

from node.daemon.assembly import STORE_EXTRA_BYTES, STORE_STATES
from node.daemon.replica import state_bytes
from node.doctor.container import cgroup_cores, cgroup_memory_left
from node.doctor.findings import Finding, finding_of_error, judge_microbatch, judge_free_space
from node.footprint import fixed_bytes
from node.model import shape_table
from node.program import build_program
from node.status import format_bytes
from node.trainer.device import choose_device, device_name
from protocol.errors import MurmurError
from protocol.identity import Identity
from protocol.manifest import Manifest

DAEMON_BYTES_PER_PARAMETER = 48  # a parameter, in main memory: anchors, snapshot, outer state, and a round's work on them
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
