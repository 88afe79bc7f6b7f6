"""A swarm: real peers of one small run, which a test watches, kills and starts again.

Each peer is `murmur join` in its own process, with its trainer and its p2pd. What a test waits for is a condition with
a deadline; where that passes, the test fails with the last status and the last words of every peer.
"""

import asyncio
import contextlib
import json
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.commands.up.peer_process import PeerProcess
from node.monitoring.status import NodeStatus
from node.options import LISTEN_ON_LOOPBACK
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from tests.swarm.processes import MARK, find_marked, process_tree, running_processes

CONFIG = Path(__file__).parents[2] / "configs" / "test.toml"
POLL_SECONDS = 0.05  # seconds between two looks at a condition
START_SECONDS = 120.0  # until a peer answers; it imports torch, as others do beside it, on a machine that may be slow
ENDLESS = 1_000_000  # rounds
JOINED = "joined.toml"  # the manifest of all peers but the first
WORDS = ("flock", "murmur", "wing", "evening", "reed", "turn", "seven", "neighbours", "sky", "roost", "falcon", "and")


def manifest_with(**changes: Mapping[str, Any]) -> Manifest:
    """The smallest run there is, on a small text; `changes` by table."""
    values = load_manifest(CONFIG).model_dump(mode="json", exclude_none=True)
    values["data"] |= {"source": "text", "path": "corpus.txt"}
    for table, keys in changes.items():
        values[table] = values.get(table, {}) | keys
    return Manifest.model_validate_json(json.dumps(values))


def write_run(folder: Path, manifest: Manifest) -> Path:
    """The manifest, the one that peers without the first weights have, and the text that both name, beside them."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(20_000)))
    (folder / "run.toml").write_text(manifest.to_toml())
    (folder / JOINED).write_text(manifest.published().to_toml())
    return folder / "run.toml"


@contextlib.contextmanager
def isolated_processes() -> Iterator[str]:
    """Whatever is started inside carries a mark, and puts its sockets into a folder of its own; none may be left."""
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="mm", dir="/tmp") as temporary:
        patch.setenv(MARK, mark)
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", None)
        try:
            yield mark
        finally:
            for process in find_marked(mark):
                with contextlib.suppress(psutil.NoSuchProcess):  # it was about to end
                    process.kill()


class ProcessSwarm:
    def __init__(self, folder: Path, manifest: Manifest, peers: int, *more: str) -> None:
        """`more`: words of each peer's command."""
        self.manifest = manifest
        self._more = more
        self.run = write_run(folder, manifest)
        self.peers = [self._make_peer(index) for index in range(peers)]

    def add_peer(self, *more: str) -> PeerProcess:
        """One more peer, not started yet; `more`: words of its command alone."""
        self.peers.append(self._make_peer(len(self.peers), *more))
        return self.peers[-1]

    def start(self) -> None:
        """The first, and all others introduced by it."""
        self.start_first()
        for peer in self.peers[1:]:
            peer.start(self.peers[0].addresses()[:1])

    def start_first(self) -> None:
        first = self.peers[0]
        first.start(())
        self.wait_until(lambda: bool(first.addresses() or not first.is_running), "the first peer has an address")
        assert first.is_running, self.describe()

    def kill(self) -> None:
        """Every daemon, trainer and p2pd at once."""
        doomed = [process for peer in self.peers if peer.is_running for process in process_tree(daemon_pid(peer))]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for peer in self.peers:
            peer.kill()
        self.wait_until(lambda: not running_processes(doomed), "all are dead")

    def kill_peer(self, peer: PeerProcess) -> None:
        """Its daemon, trainer and p2pd at once."""
        for process in process_tree(daemon_pid(peer)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        peer.kill()

    def leave(self) -> None:
        """Politely; what does not leave is killed."""
        for peer in self.peers:
            peer.interrupt()
        try:
            self.wait_until(lambda: not any(peer.is_running for peer in self.peers), "all have left")
        finally:
            self.kill()

    def poll(self, *peers: PeerProcess) -> list[NodeStatus]:
        """What each of them (default: all) says now, or said last; those that have said nothing are left out."""
        chosen = peers or tuple(self.peers)

        async def ask() -> None:
            await asyncio.gather(*(peer.poll() for peer in chosen))

        asyncio.run(ask())
        return [peer.status for peer in chosen if peer.status]

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> float:
        """Until the condition holds; the seconds that took. AssertionError with all that is known where it does not."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, f"not in {seconds:g} s: {what}\n{self.describe()}"
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def wait_for_round(self, number: int, *peers: PeerProcess, seconds: float = START_SECONDS) -> None:
        """Until each of them (default: all) has applied so many rounds."""
        chosen = peers or tuple(self.peers)

        def reached() -> bool:
            statuses = self.poll(*chosen)
            return len(statuses) == len(chosen) and all(status.round >= number for status in statuses)

        self.wait_until(reached, f"{', '.join(peer.name for peer in chosen)} in round {number}", seconds)

    def wait_for_agreement(self, seconds: float = START_SECONDS, after: int = 0) -> int:
        """Until all have been seen with the same model in the same round, later than `after`; returns the round."""
        seen: dict[tuple[int, str, str], set[str]] = {}
        agreed: list[int] = []

        def met() -> bool:
            for status in self.poll():
                key = (status.round, status.digest, status.state_digest)
                seen.setdefault(key, set()).add(status.peer_id)
            agreed.extend(key[0] for key, who in seen.items() if key[0] > after and len(who) == len(self.peers))
            return bool(agreed)

        self.wait_until(met, f"all agree in a round after {after}", seconds)
        return agreed[0]

    def describe(self) -> str:
        """The last status and the last words of every peer."""
        lines = []
        for peer in self.peers:
            told = peer.status.model_dump_json(exclude={"seconds", "addresses"}) if peer.status else "no status"
            lines += [f"{peer.name} ({peer.returncode}): {told}", *(f"    {line}" for line in peer.log_tail(15))]
        return "\n".join(lines)

    def log(self, peer: PeerProcess) -> str:
        return peer.log.read_text()

    def _make_peer(self, index: int, *more: str) -> PeerProcess:
        name = f"peer-{index}"
        home = self.run.parent / name
        run = self.run if index == 0 else self.run.parent / JOINED
        return PeerProcess(name, home, join_command(run, home, "--name", name, *self._more, *more))


def join_command(run: Path, home: Path, *more: str, listen: str = LISTEN_ON_LOOPBACK) -> list[str]:
    words = [sys.executable, "-m", "node.cli", "join", str(run), "--dir", str(home)]
    return [*words, "--listen", listen, "--device", "cpu", "--threads", "1", *more]


def daemon_pid(peer: PeerProcess) -> int:
    """Of its daemon, which runs or ran last."""
    assert peer._process is not None
    return peer._process.pid


@contextlib.contextmanager
def running_swarm(folder: Path, manifest: Manifest, peers: int = 3, *more: str) -> Iterator[ProcessSwarm]:
    """A swarm in its own world; dead at the end, whatever happened."""
    with isolated_processes():
        swarm = ProcessSwarm(folder, manifest, peers, *more)
        try:
            yield swarm
        finally:
            swarm.kill()
