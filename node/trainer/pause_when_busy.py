"""When a trainer stands back for others who use its device, and when it goes on. PURE.

Two thresholds and two delays, so that it neither stops for a moment's work nor goes back and forth.

How much of a device others use: of the processors from /proc, of an accelerator from its driver.

Ours are all trainers on this machine, their daemons and what those started: peers that share a machine must not stand
back for one another. All else counts, whoever it belongs to, also what runs in other containers.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from protocol.errors import DeviceError

PAUSE_AFTER_SECONDS = 4.0  # that others need the device before the trainer stands back
RESUME_AFTER_SECONDS = 10.0  # that they leave it alone before it goes on


class PausePolicy:
    """`pause_share`, `resume_share`: of the device in the hands of others, 0 to 1; `now` in seconds, monotonic."""

    def __init__(self, pause_share: float, resume_share: float) -> None:
        self._pause_share = pause_share
        self._resume_share = resume_share
        self._contrary_since: float | None = None  # when the share came to speak against what we do
        self.paused = False

    def update(self, share: float, now: float) -> bool:
        """Takes a measured share into account; whether that has changed `paused`."""
        against = share < self._resume_share if self.paused else share >= self._pause_share
        if not against:
            self._contrary_since = None
            return False
        self._contrary_since = now if self._contrary_since is None else self._contrary_since
        if now - self._contrary_since < (RESUME_AFTER_SECONDS if self.paused else PAUSE_AFTER_SECONDS):
            return False
        self.paused = not self.paused
        self._contrary_since = None
        return True


TRAINER_MODULE = b"node.trainer"
STAT_FIELDS = 8  # of the first line of /proc/stat: what follows is contained in these
IDLE, IOWAIT, STEAL = 3, 4, 7
PARENT, USER_TICKS, SYSTEM_TICKS, START_TIME = 1, 11, 12, 19  # in /proc/PID/stat, after the name
CONTEXT_BYTES = 1 << 30  # of an accelerator's memory that our own process has beside its tensors


class UsageMeter(Protocol):
    """`share()`: of the device used by others since the last call, 0 to 1; None: not known yet. `what`: in words."""

    description: str
    pause_share: float
    resume_share: float

    def measure_share(self) -> float | None: ...


@dataclass(frozen=True)
class _Process:
    parent: int
    ticks: int
    started: int


class CpuMeter:
    description = "of the processors"
    pause_share, resume_share = 0.25, 0.15

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._trainers: dict[tuple[int, int], bool] = {}  # by process and its start
        self._own_ticks_before: dict[tuple[int, int], int] = {}
        self._busy = self._total = 0
        if self._read_total() is None:
            raise DeviceError("--pause-when-busy reads /proc, which this system does not have; leave it out")

    def measure_share(self) -> float | None:
        now, ours = self._read_total(), self._read_own_ticks()
        if now is None:
            return None
        (busy, total), (busy_before, total_before) = now, (self._busy, self._total)
        spent = sum(ticks - self._own_ticks_before.get(key, 0) for key, ticks in ours.items())
        self._busy = busy
        self._total = total
        self._own_ticks_before = ours
        if not total_before or total <= total_before:
            return None
        return min(1.0, max(0.0, (busy - busy_before - spent) / (total - total_before)))

    def _read_total(self) -> tuple[int, int] | None:
        """Ticks of all processors together: spent on work, and passed."""
        try:
            with (self._proc / "stat").open() as file:
                fields = [int(word) for word in file.readline().split()[1 : STAT_FIELDS + 1]]
        except (OSError, ValueError):
            return None
        if len(fields) < STAT_FIELDS:
            return None
        return sum(fields) - fields[IDLE] - fields[IOWAIT] - fields[STEAL], sum(fields)

    def _read_own_ticks(self) -> dict[tuple[int, int], int]:
        found = {int(entry.name): self._read_process(entry) for entry in self._proc.glob("[0-9]*")}
        alive = {pid: process for pid, process in found.items() if process is not None}
        self._trainers = {
            key: self._trainers[key] if key in self._trainers else self._is_trainer(pid)
            for pid, process in alive.items()
            for key in ((pid, process.started),)
        }
        trainers = {pid for (pid, _), is_trainer in self._trainers.items() if is_trainer}
        daemons = {alive[pid].parent for pid in trainers} - {0, 1}
        ours = {pid for pid, process in alive.items() if pid in trainers | daemons or process.parent in daemons}
        return {(pid, alive[pid].started): alive[pid].ticks for pid in ours}

    def _read_process(self, entry: Path) -> _Process | None:
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
            return _Process(int(fields[PARENT]), ticks, int(fields[START_TIME]))
        except (OSError, ValueError, IndexError):
            return None  # it has just ended

    def _is_trainer(self, pid: int) -> bool:
        try:
            return TRAINER_MODULE in (self._proc / str(pid) / "cmdline").read_bytes().split(b"\0") or pid == os.getpid()
        except OSError:
            return False


class AcceleratorMeter:
    """By memory: that is what the driver tells of others without more rights."""

    description = "of the accelerator's memory"
    pause_share, resume_share = 0.10, 0.06

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure_share(self) -> float | None:
        free, total = torch.cuda.mem_get_info(self._device)
        own = torch.cuda.memory_reserved(self._device) + CONTEXT_BYTES
        return max(0.0, (total - free - own) / total)


def usage_meter_for(device: torch.device) -> UsageMeter:
    return AcceleratorMeter(device) if device.type == "cuda" else CpuMeter()
