"""`murmur doctor`: can this machine take part, and if not, what to do.

Each check is a finding: ok, warn or fail, and for what is not ok the mend. What can be computed is computed from the
manifest (`node.footprint`).
"""

import asyncio
import ipaddress
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import httpx2
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.config import EVERYWHERE_LISTEN
from node.daemon.assembly import STORE_EXTRA_BYTES, STORE_STATES
from node.daemon.replica import state_bytes
from node.footprint import fixed_bytes, largest_microbatch
from node.links import Invitation, accept
from node.model import shape_table
from node.places import joined_folder
from node.program import program_of
from node.status import short_bytes, short_count
from node.trainer.device import choose_device, device_name
from protocol.errors import MurmurError, UnreachableError
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.membership.directory import CLOCK_TOLERANCE
from protocol.network.transport import Transport

Level = Literal["ok", "warn", "fail"]
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
DIAL_SECONDS = 10.0
DATE_SECONDS = 10.0
MAX_DIALLED = 8
NODE_BYTES = 48  # a parameter, in main memory: anchors, snapshot, outer state, and a round's work on them
BASE_BYTES = 1_000_000_000  # of the daemon and p2pd
CLOCK_WARN = 5.0


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    found: str
    mend: str = ""


def doctor(run: str | None, folder: Path | None, insecure: bool, as_json: bool) -> int:
    """Prints the findings; 0 when none is a fail, else 1."""
    findings = examine(run, folder, insecure)
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    else:
        Console(highlight=False).print(_table(findings))
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def examine(run: str | None, folder: Path | None, insecure: bool) -> list[Finding]:
    findings = [Finding("version", "ok", f"murmur {version('murmuration')}, torch {torch.__version__}"), _device()]
    invitation: Invitation | None = None
    if run is not None:
        try:
            invitation = accept(run, insecure)
        except MurmurError as error:
            text, _, mend = str(error).partition("; ")
            return [*findings, Finding("run", "fail", text, mend)]
        findings.append(_run(invitation))
    home = folder or (joined_folder(invitation.manifest) if invitation else Path.cwd())
    findings.append(_key(home / "key"))
    if invitation is not None:
        findings += [*_room(invitation.manifest, home), _clock(invitation.source)]
    findings += asyncio.run(_network(invitation))
    return findings


def _device() -> Finding:
    device = choose_device("auto")
    cores = len(os.sched_getaffinity(0))
    if device.type == "cpu":
        return Finding("device", "warn", f"no accelerator, {cores} cores", "trains, but slowly; install a CUDA torch")
    free, total = torch.cuda.mem_get_info()
    return Finding("device", "ok", f"{device_name(device)}, {short_bytes(free)} of {short_bytes(total)} free")


def _run(invitation: Invitation) -> Finding:
    manifest = invitation.manifest
    signed = "signed" if invitation.organiser else "not signed"
    count = short_count(shape_table(manifest.model).numel)
    return Finding("run", "ok", f"{manifest.run.name}, {count} parameters, {manifest.method.recipe}, {signed}")


def _key(path: Path) -> Finding:
    if not path.exists():
        return Finding("key", "ok", "none yet; made at the first join")
    try:
        return Finding("key", "ok", Identity.load_or_create(path).peer_id)
    except MurmurError as error:
        text, _, mend = str(error).partition("; ")
        return Finding("key", "fail", text, mend)


def _room(manifest: Manifest, home: Path) -> list[Finding]:
    """Memory of the device, main memory and disk against what the run needs."""
    parameters = shape_table(manifest.model).numel
    device = choose_device("auto").type
    daemon = parameters * NODE_BYTES + BASE_BYTES
    main = daemon + fixed_bytes(manifest, device) if device == "cpu" else daemon
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else max(0, free_memory() - daemon)
    disk = STORE_STATES * state_bytes(parameters, program_of(manifest).method) + STORE_EXTRA_BYTES
    existing = next(parent for parent in (home, *home.absolute().parents) if parent.exists())
    return [
        judged_microbatch(manifest, free, device),
        judged_room("memory", free_memory(), main, "close other programs, or use a machine with more"),
        judged_room("disk", shutil.disk_usage(existing).free, disk, "free some space, or choose another --dir"),
    ]


def judged_room(check: str, free: float, needed: float, mend: str) -> Finding:
    text = f"{short_bytes(free)} free, up to {short_bytes(needed)} needed"
    return Finding(check, "ok" if free >= needed else "fail", text, "" if free >= needed else mend)


def judged_microbatch(manifest: Manifest, free: float, device: str) -> Finding:
    fits = largest_microbatch(manifest, free, device)
    text = f"microbatches of {fits} sequences fit, the run's have {manifest.train.microbatch}"
    if fits >= manifest.train.microbatch:
        return Finding("model", "ok", text)
    mend = "this device is too small for the run" if fits == 0 else "nothing: it takes more passes for a batch"
    return Finding("model", "fail" if fits == 0 else "warn", text, mend)


def free_memory() -> int:
    """Bytes of main memory that programs can still have."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _clock(source: str | None) -> Finding:
    if source is None:
        return Finding("clock", "ok", "not compared; a link to a host would tell")
    try:
        date = httpx2.head(source, timeout=DATE_SECONDS).headers["date"]
        return judged_clock(time.time() - parsedate_to_datetime(date).timestamp())
    except (httpx2.HTTPError, KeyError, ValueError):
        return Finding("clock", "warn", "the host does not tell its time", "nothing, if you trust your clock")


def judged_clock(offset: float) -> Finding:
    level: Level = "ok" if abs(offset) < CLOCK_WARN else "warn" if abs(offset) < CLOCK_TOLERANCE else "fail"
    mend = "" if level == "ok" else "let the system set its clock: timedatectl set-ntp true"
    return Finding("clock", level, f"{offset:+.0f} s against the host", mend)


async def _network(invitation: Invitation | None) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        try:
            transport = await Transport.start(Path(folder) / "key", Path(folder), [], listen=[EVERYWHERE_LISTEN])
        except MurmurError as error:
            return [Finding("network", "fail", str(error), "see whether a firewall or a full disk is in the way")]
        try:
            found = [judged_addresses(await transport.addresses())]
            if invitation is not None:
                wanted = (*invitation.peers, *invitation.manifest.run.bootstrap)[:MAX_DIALLED]
                found.append(judged_peers(await _dialled(transport.connect, wanted)))
            return found
        finally:
            await transport.stop()


def judged_addresses(addresses: Sequence[str]) -> Finding:
    if any(_is_public(address) for address in addresses):
        return Finding("ports", "ok", "a public address: others can reach this machine")
    mend = "nothing, where a public peer takes part; otherwise forward a port and name it with --listen"
    return Finding("ports", "warn", "no public address: others come by the connections that you open", mend)


def _is_public(address: str) -> bool:
    kind, _, rest = address.lstrip("/").partition("/")
    try:
        return kind in ("ip4", "ip6") and ipaddress.ip_address(rest.partition("/")[0]).is_global
    except ValueError:
        return False


Connect = Callable[[str, float], Coroutine[Any, Any, str]]


async def _dialled(connect: Connect, addresses: Sequence[str]) -> list[tuple[str, float | str]]:
    """Each address with the seconds that it took, or why it failed."""

    async def dial(address: str) -> tuple[str, float | str]:
        began = time.monotonic()
        try:
            await connect(address, DIAL_SECONDS)
        except UnreachableError as error:
            return address, str(error)
        return address, time.monotonic() - began

    return await asyncio.gather(*(dial(address) for address in addresses))


def judged_peers(dialled: Sequence[tuple[str, float | str]]) -> Finding:
    if not dialled:
        return Finding("peers", "warn", "the run names nobody to ask", "give `murmur join` a --peer")
    times = [result for _, result in dialled if isinstance(result, float)]
    if times:
        return Finding(
            "peers", "ok", f"{len(times)} of {len(dialled)} addresses answer, the first in {min(times):.1f} s"
        )
    mend = "see whether a firewall stops outgoing TCP, or ask the organiser for an address"
    return Finding("peers", "fail", f"none of {len(dialled)} addresses answers: {dialled[0][1]}", mend)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("check", "", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=COLOURS[finding.level])
        table.add_row(finding.check, level, Text(finding.found), Text(finding.mend))
    return table
