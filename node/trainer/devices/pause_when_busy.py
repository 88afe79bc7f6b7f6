"""Pause a trainer while other programs use its device.

The policy is pure. It has two thresholds and two delays, so that the trainer neither pauses for a short burst of work
nor alternates quickly. The meters read the use of processors from /proc, of an accelerator's memory from its driver.

Peers that share a machine must not pause for one another, so trainers on this machine, their daemons and the processes
that these started do not count. All other processes count, including processes in other containers.
"""

import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.errors import DeviceError

PAUSE_AFTER_SECONDS = 4.0  # of use by others
RESUME_AFTER_SECONDS = 10.0  # without use by others
USAGE_SECONDS = 2.0  # between two measurements


class PausePolicy:
    """Decides when to pause, by the share of the device that others use (0 to 1).

    Times are seconds of a monotonic clock.
    """

    def __init__(self, pause_share: float, resume_share: float) -> None:
        self._pause_share = pause_share
        self._resume_share = resume_share
        self._contrary_since: float | None = None  # start of the time in which the share contradicts `paused`
        self.paused = False

    def update(self, share: float, now: float) -> bool:
        """Apply a measured share; return whether `paused` changed."""
        is_contrary = share < self._resume_share if self.paused else share >= self._pause_share
        if not is_contrary:
            self._contrary_since = None
            return False
        self._contrary_since = now if self._contrary_since is None else self._contrary_since
        if now - self._contrary_since < (RESUME_AFTER_SECONDS if self.paused else PAUSE_AFTER_SECONDS):
            return False
        self.paused = not self.paused
        self._contrary_since = None
        return True


TRAINER_MODULES = {b"node.trainer", b"node.trainer.ranks"}
STAT_FIELDS = 8  # on the first line of /proc/stat; these contain the fields after them
IDLE, IOWAIT, STEAL = 3, 4, 7
PARENT, USER_TICKS, SYSTEM_TICKS, START_TIME = 1, 11, 12, 19  # in /proc/PID/stat, after the name
CONTEXT_BYTES = 1 << 30  # of an accelerator's memory that our process uses in addition to its tensors


class UsageMeter(ABC):
    """Measures how much of a device other programs use; `description` completes "others use 30% ..."."""

    description: str
    pause_share: float
    resume_share: float

    @abstractmethod
    def measure_share(self) -> float | None:
        """Return the share (0 to 1) that others have used since the last call; `None` if it is not yet known."""


@dataclass(frozen=True)
class _Process:
    parent: int
    ticks: int
    started: int


class CpuMeter(UsageMeter):
    """Measures processor time, by /proc."""

    description = "of the processors"
    pause_share, resume_share = 0.25, 0.15

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._trainers: dict[tuple[int, int], bool] = {}  # by process id and start time
        self._own_ticks_before: dict[tuple[int, int], int] = {}
        self._busy = self._total = 0
        if self._read_total() is None:
            raise DeviceError("--pause-when-busy reads /proc, which this system does not have; leave it out")

    def measure_share(self) -> float | None:
        """Return the share of processor time that others used since the last call."""
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
        """Return busy and elapsed ticks, summed over all processors."""
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
            return None  # the process has just ended

    def _is_trainer(self, pid: int) -> bool:
        try:
            words = (self._proc / str(pid) / "cmdline").read_bytes().split(b"\0")
            return not TRAINER_MODULES.isdisjoint(words) or pid == os.getpid()
        except OSError:
            return False


class AcceleratorMeter(UsageMeter):
    """Measures memory, because the driver shows no more of other processes without privileges."""

    description = "of the accelerator's memory"
    pause_share, resume_share = 0.10, 0.06

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure_share(self) -> float | None:
        """Return the share of memory that others hold."""
        free, total = torch.cuda.mem_get_info(self._device)
        own = torch.cuda.memory_reserved(self._device) + CONTEXT_BYTES
        return max(0.0, (total - free - own) / total)


def usage_meter_for(device: torch.device) -> UsageMeter:
    """Return a meter for the device; raises DeviceError if it cannot be measured."""
    return AcceleratorMeter(device) if device.type == "cuda" else CpuMeter()


class DevicePause:
    """The pause of a trainer while other programs use its device; without a meter it never pauses."""

    def __init__(self, meter: UsageMeter | None) -> None:
        self._meter = meter
        self._policy = PausePolicy(meter.pause_share, meter.resume_share) if meter else None
        self._measured_at = -math.inf

    @property
    def is_paused(self) -> bool:
        return self._policy is not None and self._policy.paused

    def update(self, now: float) -> str | None:
        """Measure the use if it is time; return why the trainer pauses from now on, or "" if it resumes."""
        if self._meter is None or self._policy is None or now - self._measured_at < USAGE_SECONDS:
            return None
        self._measured_at, share = now, self._meter.measure_share()
        if share is None or not self._policy.update(share, now):
            return None
        return f"others use {share:.0%} {self._meter.description}" if self._policy.paused else ""
