"""Swarms of forked peers, and the comparison of what they count with what their trainers contain."""

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.pipelines.tally_trainer import Truth
from tests.pipelines.zygote import fork

CONTEXT, MICROBATCH = 64, 1
WAIT_SECONDS = 100.0
POLL_SECONDS = 0.05
MAX_REPLY_BYTES = 1 << 20


@dataclass(frozen=True)
class Setting:
    """A pipeline of tests.

    Args:
        seconds: of a microbatch, at a trainer.
        memory: of each server, in activations.
        snapshot_steps, contribution_steps: of the trainers; 0 means never.
    """

    stages: int = 2
    step: int = 2
    in_flight: int = 4
    memory: int = 64
    seconds: float = 0.01
    snapshot_steps: int = 1
    contribution_steps: int = 0
    width: int = 512  # activations of 64 KiB; no manifest allows memory below 1 MiB
    heartbeat: float = 0.2
    expiry: float = 30.0  # a dead peer is missed at once, because calls to it fail

    @property
    def memory_bytes(self) -> int:
        return self.memory * 2 * CONTEXT * self.width * MICROBATCH

    def manifest(self) -> dict[str, Any]:
        return {
            "run": {"name": "test"},
            "model": {"width": self.width, "layers": self.stages, "heads": 1, "hidden": self.width, "context": CONTEXT},
            "data": {"source": "python-stdlib"},
            "train": {"batch_tokens": self.step * CONTEXT * MICROBATCH, "learning_rate": 1e-3},
            "method": {"recipe": "frugal"},
            "membership": {"heartbeat": self.heartbeat, "expiry": self.expiry},
            "pipeline": {
                "stages": self.stages,
                "microbatch": MICROBATCH,
                "in_flight": self.in_flight,
                "memory": self.memory_bytes,
            },
        }

    def trainer(self) -> dict[str, Any]:
        steps = {"snapshot_steps": self.snapshot_steps, "contribution_steps": self.contribution_steps}
        return {"seconds": self.seconds, **steps}


@dataclass(frozen=True)
class Start:
    """How a peer starts. `naive`: the defences that it lacks."""

    stage: int
    faults: str = ""
    naive: tuple[str, ...] = ()


@dataclass
class Peer:
    """The test's side of a process."""

    stage: int
    folder: Path
    pid: int
    orders: socket.socket
    address: dict[str, Any] = field(default_factory=dict)
    is_alive: bool = True
    last: dict[str, Any] = field(default_factory=dict)  # counters, when they were last asked for

    @property
    def name(self) -> str:
        return str(self.address["peer"])

    def request(self, **order: object) -> dict[str, Any]:
        self.orders.sendall(json.dumps(order).encode())
        return self.receive()

    def receive(self) -> dict[str, Any]:
        body = self.orders.recv(MAX_REPLY_BYTES)
        if not body:
            raise EOFError(f"{self.folder.name} has died: {self.log()}")
        answer: dict[str, Any] = json.loads(body)
        return answer

    def counts(self) -> dict[str, Any]:
        self.last = self.request(counts=True)
        return self.last

    def truth(self) -> Truth:
        return Truth.read(self.folder / "journal")

    def log(self, lines: int = 15) -> str:
        logs = [self.folder / "log", self.folder / "trainer.log"]
        return "\n".join("\n".join(log.read_text().splitlines()[-lines:]) for log in logs if log.exists())

    def full_log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        """SIGKILL to the daemon and its p2pd; its trainer ends by itself."""
        self.is_alive = False
        self.orders.close()
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            for process in [*parent.children(recursive=True), parent]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def has_died(self) -> bool:
        """Return whether the daemon has ended; clean up after it if it has just done so."""
        if self.is_alive and not psutil.pid_exists(self.pid):
            self.is_alive = False
            self.orders.close()
        return not self.is_alive

    def freeze(self) -> None:
        """Stop the daemon as if the network to it were cut: calls to it and from it stay without an answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class PipelineSwarm:
    """Peers of one run. All begin to serve at once; microbatches begin at `begin`."""

    def __init__(self, zygote: str, folder: Path, setting: Setting) -> None:
        self.setting = setting
        self.peers: list[Peer] = []
        self._zygote = zygote
        self._folder = folder

    def add(self, start: "Start", home: Path | None = None) -> Peer:
        """Start a process; it joins with `introduce`."""
        folder = home or self._folder / f"peer-{len(self.peers)}"
        folder.mkdir(exist_ok=True, parents=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(WAIT_SECONDS)
        words = {
            "manifest": self.setting.manifest(),
            "stage": start.stage,
            "folder": str(folder),
            "zygote": self._zygote,
            "trainer": self.setting.trainer(),
            "faults": start.faults,
            "naive": start.naive,
        }
        with theirs:
            pid = fork(self._zygote, "tests.pipelines.peer", words, folder / "log", [theirs.fileno()])
        peer = Peer(start.stage, folder, pid, ours)
        self.peers.append(peer)
        return peer

    def introduce(self, *new: Peer) -> None:
        """Let new peers know all live ones, and wait until all know one another."""
        for peer in new:
            peer.address = peer.receive()
        contacts = [peer.address for peer in self.live]
        for peer in new:
            peer.request(contacts=contacts)
        self.wait(lambda: all(self._knows_all(peer) for peer in self.live), "all peers know one another")

    def _knows_all(self, peer: Peer) -> bool:
        counts = peer.counts()
        return bool(counts["live"] >= len(self.live) and counts["trainer"])

    @property
    def live(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.is_alive]

    def begin(self, count: int, *owners: Peer) -> None:
        """Let peers begin so many microbatches each."""
        for peer in owners or self.live:
            peer.request(begin=count)

    def ended(self) -> dict[str, str]:
        """Return how the microbatches of the live owners have ended."""
        return {name: how for peer in self.live for name, how in peer.counts()["ended"].items()}

    def wait_until_ended(self, count: int, seconds: float = WAIT_SECONDS) -> dict[str, str]:
        """Wait until so many microbatches of the live owners have ended."""
        self.wait(lambda: len(self.ended()) >= count, f"{count} microbatches have ended", seconds)
        return self.ended()

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, f"not in {seconds:g} s: {what}\n{self.describe()}"
            time.sleep(POLL_SECONDS)

    def wait_until_still(self, seconds: float) -> int:
        """Wait until no microbatch has ended for so long; return how many have."""
        count, since = -1, time.monotonic()
        while time.monotonic() - since < seconds:
            time.sleep(POLL_SECONDS)
            if (now := len(self.ended())) != count:
                count, since = now, time.monotonic()
        return count

    def total(self, name: str) -> int:
        """Return the sum of a counter over the live peers."""
        return sum(peer.counts()["microbatches"].get(name, 0) for peer in self.live)

    def copies(self, stage: int) -> Counter[str]:
        """Return how often the weights of a stage contain each microbatch; of dead peers, what they contributed."""
        found: Counter[str] = Counter()
        for peer in self.peers:
            if peer.stage == stage:
                truth = peer.truth()
                found += truth.counted if peer.is_alive else truth.contributed
        return found

    def audit(self, owner: Peer) -> "Audit":
        """Compare the microbatches of an owner that are done with the weights of all stages."""
        done = {name for name, how in owner.counts()["ended"].items() if how == "done"}
        copies = [self.copies(stage) for stage in range(self.setting.stages)]
        missing = [name for counted in copies for name in done - counted.keys()]
        doubled = [name for counted in copies for name, n in counted.items() if n > 1 and name.startswith(owner.name)]
        return Audit(len(done), len(missing), len(doubled))

    def describe(self) -> str:
        lines = []
        for peer in self.peers:
            with suppress(OSError, EOFError):
                if peer.is_alive:
                    peer.counts()
            lines += [f"{peer.folder.name}, stage {peer.stage}, alive {peer.is_alive}: {_short(peer.last)}", peer.log()]
        return "\n".join(lines)

    def stop(self) -> None:
        for peer in self.live:
            peer.kill()


@dataclass(frozen=True)
class Audit:
    """Microbatches that are done; their gradients in nobody's weights; and gradients that a stage has twice."""

    done: int
    missing: int
    doubled: int


def _short(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in counts.items() if name not in ("ended", "ledger")}


@contextmanager
def running(zygote: str, folder: Path, setting: Setting, *starts: Start) -> Iterator[PipelineSwarm]:
    """A swarm whose peers know one another."""
    swarm = PipelineSwarm(zygote, folder, setting)
    try:
        swarm.introduce(*[swarm.add(start) for start in starts])
        yield swarm
    finally:
        swarm.stop()
