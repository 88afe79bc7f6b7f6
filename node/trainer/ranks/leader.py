"""Rank 0 of a node: it starts the other ranks, sends them commands, and executes the same commands itself.

If another rank dies, this process exits too, which kills the rest. So the daemon sees one trainer that died. Ranks on
other machines of a site are started there (node.trainer.site), and get the same commands.
"""

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from node.model import LanguageModel
from node.monitoring.status import DeviceUse
from node.processes.process import python_environment
from node.trainer.devices.device import measure_device_use
from node.trainer.ending import OtherRanksNeeded
from node.trainer.ipc.channel import FrameSocket, TrainerConfig
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.live import LiveVectors
from node.trainer.ranks.messages import (
    FROM_RANK,
    ClearVectors,
    CopyVectors,
    Done,
    EndRank,
    Listening,
    MeasureDevice,
    MeasureLoss,
    Meet,
    RankCommand,
    RankConfig,
    RankStep,
    SiteGroup,
)
from node.trainer.site.head import JoinedMachine, SiteHead
from node.trainer.site.messages import Target, own_host
from optim.round_plan import RoundPlanner
from protocol.manifest.reading import parse_manifest

if TYPE_CHECKING:
    from node.trainer.ranks.group import RankGroup
    from node.trainer.ranks.rank import Rank
    from node.trainer.ranks.sharded_model import ShardedOptimizer

RANK_MODULE: Final = "node.trainer.ranks"
DONE_SECONDS: Final = 600.0  # for copies of a rank's parts
END_SECONDS: Final = 10.0
GRACE_SECONDS: Final = 2.0  # if the death of another rank caused an error, it ends this process within this time
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OtherRank:
    """A rank in another process; `process` is `None` on another machine."""

    process: subprocess.Popen[bytes] | None
    channel: FrameSocket


class RankLeader(LiveVectors):
    """Commands all ranks of a node; their parts together are the vectors in training."""

    def __init__(self, rank: "Rank", others: Sequence[OtherRank], site: SiteHead | None = None) -> None:
        self._rank = rank
        self._others = others
        self._site = site
        self._far = [number for number, other in enumerate(others, start=1) if other.process is None]

    @property
    def model(self) -> LanguageModel:
        """Return the module of rank 0, which computes only when all ranks do."""
        return self._rank.model

    @property
    def compile_fault(self) -> str:
        """Return why the model is not compiled although it should be; empty otherwise."""
        return self._rank.compile_fault

    @property
    def optimizer(self) -> "ShardedOptimizer":
        """Return the optimizer of rank 0, whose settings the other ranks get with each step."""
        return self._rank.optimizer

    def accumulate_gradient(self, windows: Tensor, step: int) -> float:
        """Begin a step: accumulate the gradient of a batch (sequences, context + 1); return its mean loss.

        The other ranks then apply the gradient if loss and norm are finite, and so must the caller.
        """
        optimizer = self.optimizer
        command = RankStep(
            step=step,
            rows=len(windows),
            train=optimizer.train,
            age_at_join=optimizer.age_at_join,
            moments_age_at_join=optimizer.moments_age_at_join,
        )
        with self._together(command):
            return self._rank.accumulate_gradient(command, windows)

    def measure_loss(self, round_number: int, batches: Sequence[Tensor]) -> tuple[float, int]:
        """Return the mean loss of the anchor of a round in nats per token, and the number of tokens."""
        command = MeasureLoss(round=round_number, rows=tuple(len(windows) for windows in batches))
        with self._together(command):
            for number in self._far:
                self._rank.send_anchor(round_number, number)
            return self._rank.measure_loss(command, batches)

    def save(self, shared: Mapping[str, Tensor]) -> None:
        with self._together(CopyVectors(direction="save")):
            self._rank.save(shared)
            for number in self._far:
                self._rank.receive_parts(shared, number)
            self._wait_until_done()

    def load(self, shared: Mapping[str, Tensor]) -> None:
        with self._together(CopyVectors(direction="load")):
            self._rank.load(shared)
            for number in self._far:
                self._rank.send_parts(shared, number)
            self._wait_until_done()

    def clear(self, names: Sequence[str]) -> None:
        if names:
            command = ClearVectors(names=tuple(names))
            with self._together(command):
                self._rank.carry_out(command)

    def measure_devices(self) -> tuple[DeviceUse, ...]:
        """Return the use of the accelerators by rank; nothing on a CPU."""
        with self._together(MeasureDevice()):
            uses = [measure_device_use(self._rank.group.device), *(done.use for done in self._wait_until_done())]
        return tuple(use for use in uses if use is not None)

    def close(self) -> None:
        """Let the other ranks exit; kill the ones that do not."""
        for other in self._others:
            other.channel.send(EndRank())
        self._rank.group.leave()
        deadline = time.monotonic() + END_SECONDS
        for other in self._others:
            if other.process is not None:
                _end(other.process, deadline)
        if self._site is not None:
            self._site.close(max(0.0, deadline - time.monotonic()))

    @contextmanager
    def grace(self) -> Iterator[None]:
        """Delay an error, so that the death of another rank, if it is the cause, ends this process first."""
        try:
            yield
        except OtherRanksNeeded:
            raise
        except Exception:
            time.sleep(GRACE_SECONDS)
            raise

    @contextmanager
    def _together(self, command: RankCommand) -> Iterator[None]:
        """Send all other ranks a command, which the caller executes for rank 0."""
        with self.grace():
            for other in self._others:
                other.channel.send(command)
            yield

    def _wait_until_done(self) -> list[Done]:
        return [answer for answer in _answers(self._others) if isinstance(answer, Done)]


@dataclass(frozen=True)
class RankPlan:
    """The ranks of a trainer: one on each device of this machine, then those of each other machine."""

    config: TrainerConfig
    devices: Sequence[torch.device]
    microbatch: int
    site: SiteHead | None = None
    machines: Sequence[JoinedMachine] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the device of each rank."""
        far = (name for machine in self.machines for name in machine.offer.devices)
        return (*map(str, self.devices), *far)

    @property
    def threads(self) -> int:
        return threads_per_rank(self.config, len(self.devices))


def start_ranks(plan: RankPlan, program: RoundPlanner, memory: SharedMemory, daemon_fd: int) -> RankLeader:
    """Start a process for each device but the first, and join them and the other machines' ranks as rank 0."""
    config = plan.config
    manifest = parse_manifest(config.manifest.encode(), "the daemon's manifest")
    torch.set_num_threads(plan.threads)
    store_fd = os.memfd_create("murmur-ranks", os.MFD_CLOEXEC)
    others = []
    for number in range(1, len(plan.devices)):
        other = _start_process((daemon_fd, memory.fds[0], store_fd), plan.threads)
        assert other.process is not None
        threading.Thread(target=_end_with, args=(number, other.process), name=f"rank {number}", daemon=True).start()
        others.append(other)
    for machine in plan.machines:
        others += [OtherRank(None, machine.channels[index]) for index in sorted(machine.channels)]
    from node.trainer.ranks.group import RankGroup  # imports FSDP for seconds, while the other ranks do so
    from node.trainer.ranks.rank import Rank

    if plan.machines:
        group = _join_site(plan, others)
    else:
        _send_configs(plan, others, None)
        group = RankGroup.join(0, len(plan.devices), plan.devices[0], store_fd)
    rank = Rank(manifest, program.method.inner, plan.microbatch, group, memory, config.options)
    return RankLeader(rank, others, plan.site)


def _send_configs(plan: RankPlan, others: Sequence[OtherRank], site: SiteGroup | None) -> None:
    for number, other in enumerate(others, start=1):
        other.channel.send(
            RankConfig(trainer=plan.config, rank=number, devices=plan.names, microbatch=plan.microbatch, site=site)
        )


def _join_site(plan: RankPlan, others: Sequence[OtherRank]) -> "RankGroup":
    """Let all ranks listen, open the tunnels between the machines, and connect the ranks."""
    from node.trainer.ranks.group import RankGroup, listen_for_ranks, open_store

    assert plan.site is not None and plan.config.site is not None
    network = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(256)}"
    machines = (len(plan.devices), *(len(machine.offer.devices) for machine in plan.machines))
    site = SiteGroup(machines=machines, shard=plan.config.site.shard, network=network, store_port=1)
    store, store_port = open_store(site.store_address)
    site = site.model_copy(update={"store_port": store_port})
    _send_configs(plan, others, site)
    ports = [listen_for_ranks(site.address(0))]
    ports += [answer.port for answer in _answers(others) if isinstance(answer, Listening)]
    hosts: list[JoinedMachine | None] = [None] * len(plan.devices)
    hosts += [machine for machine in plan.machines for _ in machine.offer.devices]
    targets = [
        _target(number, site.address(number), port, machine)
        for number, (port, machine) in enumerate(zip(ports, hosts, strict=True))
    ]
    plan.site.forward([*targets, _target(len(targets), site.store_address, store_port, None)])
    for other in others:
        other.channel.send(Meet())
    return RankGroup.join_site(0, plan.devices[0], site, store)


def _target(number: int, address: str, port: int, machine: JoinedMachine | None) -> tuple[Target, JoinedMachine | None]:
    host = own_host() if machine is None else machine.offer.host
    return Target(number=number, host=host, address=address, port=port), machine


def _answers(others: Sequence[OtherRank]) -> list[Done | Listening]:
    answers = [other.channel.receive_as(FROM_RANK, DONE_SECONDS) for other in others]
    for number, answer in enumerate(answers, start=1):
        if answer is None:
            raise TimeoutError(f"rank {number} of this node did not answer within {DONE_SECONDS:.0f} s")
    return [answer for answer in answers if answer is not None]


def _end(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()


def threads_per_rank(config: TrainerConfig, ranks: int) -> int:
    """Return the CPU threads of each rank."""
    return max(1, config.options.thread_count // ranks)


def _start_process(fds: Sequence[int], threads: int) -> OtherRank:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE, *map(str, (os.getpid(), theirs.fileno(), *fds))],
            pass_fds=(theirs.fileno(), *fds),
            stdin=subprocess.DEVNULL,
            env={**python_environment(), "OMP_NUM_THREADS": str(threads)},
        )
    return OtherRank(process, FrameSocket(ours))


def _end_with(number: int, process: subprocess.Popen[bytes]) -> None:
    """Exit when another rank dies."""
    code = process.wait()
    if code != 0:
        logger.error("rank %d died (%s); all ranks of this node start again", number, _describe_exit(code))
        os._exit(1)


def _describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
