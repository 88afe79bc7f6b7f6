"""The control traffic of real processes, by what each of them counts."""

import re
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from node.commands.up.peer_process import PeerProcess
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, daemon_pid, manifest_with, running_swarm
from tests.swarm.processes import find_trainer, process_tree

HEARTBEAT, EXPIRY = 2.0, 15.0  # the manifest's defaults
WARM_UP_ROUNDS = 3
START_SECONDS = 400.0
ROUND_SECONDS = 60.0
BYTES_LINE = re.compile(r'^murmur_bytes_total\{direction="(sent|received)",kind="(\w+)"\} ([\d.e+]+)$', re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """The cost of one peer and round: encoded bytes by kind, without blobs, and seconds.

    `wire`: the bytes that the transport counts, without the blobs; they include framing and encryption. `leader`: the
    bytes of messages of the peer that sends the most, if that is known.
    """

    sent: dict[str, float]
    received: dict[str, float]
    wire: float
    cpu_seconds: float
    trainer_cpu_seconds: float
    round_seconds: float
    leader: float = 0.0


@dataclass(frozen=True)
class Reading:
    """The sums over all peers at one moment."""

    sent: Counter[str]
    received: Counter[str]
    cpu_seconds: float
    trainer_cpu_seconds: float
    rounds: int
    time: float


def measure(peers: int, rounds: int) -> Cost:
    """Run so many real peers for so many rounds, and return the cost of one peer and round."""
    manifest = manifest_with(
        run={"min_peers": peers},
        membership={"heartbeat": HEARTBEAT, "expiry": EXPIRY},
        round={"grace": 10.0, "leader_timeout": 10.0, "exchange_timeout": 60.0},
        target={"rounds": ENDLESS},
    )
    with tempfile.TemporaryDirectory() as folder, running_swarm(Path(folder), manifest, peers) as swarm:
        swarm.start()
        swarm.wait_for_round(WARM_UP_ROUNDS, seconds=START_SECONDS)
        before = _read(swarm)
        swarm.wait_for_round(before.rounds // peers + rounds, seconds=START_SECONDS + rounds * ROUND_SECONDS)
        return _difference(before, _read(swarm), peers)


def _read(swarm: ProcessSwarm) -> Reading:
    sent, received = Counter[str](), Counter[str]()
    for peer in swarm.peers:
        for direction, kind, value in BYTES_LINE.findall(_metrics(peer)):
            (sent if direction == "sent" else received)[kind] += int(float(value))
    rounds = sum(status.round for status in swarm.poll())
    trees = [process_tree(daemon_pid(peer)) for peer in swarm.peers]
    trainers = {trainer.pid for peer in swarm.peers if (trainer := find_trainer(daemon_pid(peer)))}
    control = sum(_cpu_seconds(process) for tree in trees for process in tree if process.pid not in trainers)
    training = sum(_cpu_seconds(process) for tree in trees for process in tree if process.pid in trainers)
    return Reading(sent, received, control, training, rounds, time.monotonic())


def _metrics(peer: PeerProcess) -> str:
    port = peer.read_node_info()["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        return str(reply.read().decode())


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _difference(before: Reading, after: Reading, peers: int) -> Cost:
    rounds = after.rounds - before.rounds
    sent = {kind: (after.sent[kind] - before.sent[kind]) / rounds for kind in after.sent if kind != "blobs"}
    received = {kind: (after.received[kind] - before.received[kind]) / rounds for kind in after.received}
    received.pop("blobs", None)
    wire = sum(sent.values())  # the kinds and the rest of the transport's count
    sent.pop("other", None)
    received.pop("other", None)
    return Cost(
        sent,
        received,
        wire,
        (after.cpu_seconds - before.cpu_seconds) / rounds,
        (after.trainer_cpu_seconds - before.trainer_cpu_seconds) / rounds,
        (after.time - before.time) * peers / rounds,
    )
