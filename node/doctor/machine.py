"""What a look at this machine tells: device, key, memory, disk."""

import os
import shutil
from pathlib import Path

import torch

from node.daemon.assembly import STORE_EXTRA_BYTES, STORE_STATES
from node.daemon.replica import state_bytes
from node.doctor.container import cores_allowed, memory_left
from node.doctor.findings import Finding, failed, judged_microbatch, judged_room
from node.footprint import fixed_bytes
from node.model import shape_table
from node.program import program_of
from node.status import short_bytes
from node.trainer.device import choose_device, device_name
from protocol.errors import MurmurError
from protocol.identity import Identity
from protocol.manifest import Manifest

NODE_BYTES = 48  # a parameter, in main memory: anchors, snapshot, outer state, and a round's work on them
BASE_BYTES = 1_000_000_000  # of the daemon and p2pd


def device() -> Finding:
    chosen = choose_device("auto")
    cores = float(len(os.sched_getaffinity(0)))
    cores = min(cores, cores_allowed() or cores)
    if chosen.type == "cpu":
        found = f"no accelerator, {cores:.3g} cores"
        return Finding("device", "warn", found, "trains, but slowly; install a CUDA torch")
    free, total = torch.cuda.mem_get_info()
    return Finding("device", "ok", f"{device_name(chosen)}, {short_bytes(free)} of {short_bytes(total)} free")


def key(path: Path) -> Finding:
    if not path.exists():
        return Finding("key", "ok", "none yet; made at the first join")
    try:
        return Finding("key", "ok", Identity.load_or_create(path).peer_id)
    except MurmurError as error:
        return failed("key", error)


def room(manifest: Manifest, home: Path) -> list[Finding]:
    """Memory of the device, main memory and disk against what the run needs."""
    parameters = shape_table(manifest.model).numel
    kind = choose_device("auto").type
    daemon = parameters * NODE_BYTES + BASE_BYTES
    main = daemon + fixed_bytes(manifest, kind) if kind == "cpu" else daemon
    free = torch.cuda.mem_get_info()[0] if kind == "cuda" else max(0, free_memory() - daemon)
    disk = STORE_STATES * state_bytes(parameters, program_of(manifest).method) + STORE_EXTRA_BYTES
    existing = next(parent for parent in (home, *home.absolute().parents) if parent.exists())
    return [
        judged_microbatch(manifest, free, kind),
        judged_room("memory", free_memory(), main, "close other programs, or use a machine with more"),
        judged_room("disk", shutil.disk_usage(existing).free, disk, "free some space, or choose another --dir"),
    ]


def free_memory() -> int:
    """Bytes of main memory that programs can still have here: of the machine, and of the container if this is one."""
    free, left = _free_of_machine(), memory_left()
    return free if left is None else min(free, left)


def _free_of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
