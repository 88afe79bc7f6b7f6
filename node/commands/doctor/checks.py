"""The checks of `murmur doctor`: measure this machine, judge the result as ok, warn or fail, and say how to fix it.

Limits of a container (cgroup version 2) count too. A process is in a cgroup within other cgroups; the smallest of their
limits applies.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import psutil
import torch

from node.daemon.run_limits import STORE_EXTRA_BYTES, STORE_STATES, peer_bytes, trainer_bytes
from node.daemon.state.outer_state import state_bytes
from node.from_manifest import build_node_program
from node.model import shape_table, smallest_cut
from node.model.memory_estimate import PROCESS_BYTES, max_microbatch, run_microbatch
from node.options import usable_cores
from node.trainer.devices.device import choose_device, device_name
from node.units import format_bytes
from protocol.errors import MurmurError
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.membership.peer_table import CLOCK_TOLERANCE_SECONDS
from protocol.transport.nat import find_direct_host, is_public_address

Level = Literal["ok", "warn", "fail"]
CLOCK_WARN_SECONDS = 5.0
FORWARD_PORT_FIX = "nothing, if a public peer takes part; otherwise forward a port and name it with --listen"
CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
DAEMON_BASE_BYTES = 1_000_000_000  # daemon and p2pd without a model


@dataclass(frozen=True)
class Check:
    """The result of one check; `mend` gives the repair."""

    check: str
    level: Level
    found: str
    mend: str = ""


def finding_of_error(check: str, error: MurmurError) -> Check:
    """Return a failure; the part of the error after the semicolon says how to fix it."""
    text, _, fix = str(error).partition("; ")
    return Check(check, "fail", text, fix)


def judge_free_space(check: str, free: float, needed: float, fix: str) -> Check:
    """Compare free with needed bytes."""
    text = f"{format_bytes(free)} free, up to {format_bytes(needed)} needed"
    return Check(check, "ok" if free >= needed else "fail", text, "" if free >= needed else fix)


def judge_microbatch(manifest: Manifest, free: float, device: str, cards: int = 1) -> Check:
    """Compare the largest microbatch that fits into `free` bytes of a device with the run's.

    If it does not fit, `cards` such devices together may help.
    """
    fits = max_microbatch(manifest, free, device)
    wanted, least = run_microbatch(manifest)
    text = f"microbatches of {fits} sequences fit, the run's have {wanted}"
    if fits >= wanted:
        return Check("model", "ok", text)
    together = fits if manifest.pipeline.is_cut else max_microbatch(manifest, free, device, ranks=cards)
    if together >= least and together > fits:
        return Check("model", "warn", text, f"use --device all: {cards} cards hold a part of the model each")
    more = max_microbatch(manifest, free, device, "full")
    if fits < least:
        fix = "start with --recompute full" if more >= least else "this device is too small for the run"
    else:
        fix = f"nothing: a batch takes more passes; with --recompute full {min(more, wanted)} fit"
    return Check("model", "fail" if fits < least else "warn", text, fix)


def judge_clock(offsets: Sequence[float], against: str) -> Check:
    """Judge the median of `offsets`, our clock's lead over other clocks in seconds."""
    if not offsets:
        return Check("clock", "ok", "not compared; this needs a run with peers or a host")
    offset = median(offsets)
    level: Level = (
        "ok" if abs(offset) < CLOCK_WARN_SECONDS else "warn" if abs(offset) < CLOCK_TOLERANCE_SECONDS else "fail"
    )
    fix = "" if level == "ok" else "let the system set its clock: timedatectl set-ntp true"
    return Check("clock", level, f"{offset:+z.0f} s compared with {against}", fix)


def judge_addresses(addresses: Sequence[str]) -> Check:
    """Judge whether one of this machine's addresses is public."""
    if any(is_public_address(address) for address in addresses):
        return Check("ports", "ok", "a public address: other peers can reach this machine")
    return Check("ports", "warn", "no public address: peers use the connections that you open", FORWARD_PORT_FIX)


def judge_peers(attempts: Sequence[tuple[str, float | str]]) -> Check:
    """Judge attempts to connect: addresses, each with the seconds that it took or the reason why it failed."""
    if not attempts:
        return Check("peers", "warn", "the run names no peer to ask", "give `murmur join` a --peer")
    times = [result for _, result in attempts if isinstance(result, float)]
    if times:
        return Check(
            "peers", "ok", f"{len(times)} of {len(attempts)} addresses answer, the first in {min(times):.1f} s"
        )
    fix = "check whether a firewall blocks outgoing TCP, or ask the organiser for an address"
    return Check("peers", "fail", f"none of {len(attempts)} addresses answers: {attempts[0][1]}", fix)


def judge_public_peers(reached: Collection[str]) -> Check:
    """Judge whether any of the peers that answered (their addresses) is on the public internet."""
    public = sum(1 for address in reached if is_public_address(address))
    if public:
        return Check("public peers", "ok", f"{public} of {len(reached)} peers that answer are on the public internet")
    return Check(
        "public peers",
        "warn",
        "no public peer answers: cannot tell how the internet sees this machine",
        "nothing, if all peers share a network; otherwise one peer must open a port to the internet",
    )


def judge_nat(own: Collection[str], observed: Sequence[str]) -> Check | None:
    """Compare this machine's own addresses with those that peers see; `None` if no peer reported one."""
    hosts = {found[1] for address in observed if (found := find_direct_host([address]))}
    if not hosts:
        return None
    if hosts <= {found[1] for address in own if (found := find_direct_host([address]))}:
        return Check("nat", "ok", f"none: peers see {', '.join(sorted(hosts))}, which is this machine's own")
    if len(hosts) > 1:
        text = f"peers see {len(hosts)} different addresses of this machine"
        return Check("nat", "warn", text, "peers use the connections that you open; a VPN may be the cause")
    return Check("nat", "warn", f"behind a NAT: peers see {hosts.pop()}", FORWARD_PORT_FIX)


def judge_dial_back(answers: Mapping[str, bool], port: int) -> Check | None:
    """Judge whether peers could connect to us; `answers` has an entry per peer, and none of them gives `None`."""
    if not answers:
        return None
    able = sum(answers.values())
    text = f"{able} of {len(answers)} peers could connect to port {port}"
    return Check("ports", "ok", text) if able else Check("ports", "warn", text, FORWARD_PORT_FIX)


def judge_bandwidth(fetched_bytes: int, seconds: float, state_bytes: int, max_seconds: float) -> Check:
    """Judge the download rate from a peer.

    A new peer has to fetch `state_bytes`; it starts slowly if that takes more than `max_seconds`.
    """
    if not fetched_bytes:
        fix = "check whether the network blocks long transfers, or try again later"
        return Check("bandwidth", "fail", f"no byte of the state arrived within {seconds:.0f} s", fix)
    rate = fetched_bytes / max(seconds, 1e-9)
    text = f"{format_bytes(rate)}/s from a peer; the run's state takes {state_bytes / rate:.0f} s to fetch"
    if state_bytes / rate <= max_seconds:
        return Check("bandwidth", "ok", text)
    return Check("bandwidth", "warn", text, "the start is slow; use a faster link or a smaller run")


def judge_versions(ours: str, theirs: Collection[str]) -> Check | None:
    """Compare this version with those of the peers; `None` if no peer reports one."""
    others = sorted({version for version in theirs if version})
    if not others:
        return None
    if ours in others:
        return Check("peers' version", "ok", ", ".join(others))
    return Check("peers' version", "warn", f"{', '.join(others)}, here {ours}", "install the peers' version")


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


def check_device() -> Check:
    """Check for an accelerator."""
    chosen = choose_device("auto")
    cores = float(usable_cores())
    cores = min(cores, cgroup_cores() or cores)
    if chosen.type == "cpu":
        found = f"no accelerator, {cores:.3g} cores"
        return Check("device", "warn", found, "trains, but slowly; install a CUDA torch")
    free, total = torch.cuda.mem_get_info()
    found = f"{device_name(chosen)}, {format_bytes(free)} of {format_bytes(total)} free"
    cards = torch.cuda.device_count()
    return Check("device", "ok", found if cards < 2 else f"{found}; {cards} cards: --device all takes all of them")


def check_key(path: Path) -> Check:
    """Check that the node's key is readable, and report its peer id."""
    if not path.exists():
        return Check("key", "ok", "none yet; created at the first join")
    try:
        return Check("key", "ok", Identity.load_or_create(path).peer_id)
    except MurmurError as error:
        return finding_of_error("key", error)


def check_memory_and_disk(manifest: Manifest, node_dir: Path, smaller: str) -> list[Check]:
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
    free, left = int(psutil.virtual_memory().available), cgroup_memory_left()
    return free if left is None else min(free, left)
