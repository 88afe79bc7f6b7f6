"""Real peers on limited links whose trainers play the steps of machines of unequal speed, and which die all the time.

In every round a share of the peers is killed with SIGKILL, daemon and trainer, at moments that a seed draws; those of
the round before are started again in their folders. A line "cut" instead takes the machine off the network, so that
nobody is told of the death.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.played_card import FOLDER_VARIABLE, MODULE, STEP_VARIABLE
from node.daemon.receipts.ledger import RunLedger, commit_reader, read_ledger
from protocol.manifest.run import Manifest
from tests.netlab.lab.lab_swarm import LabPeer, LabSwarm, running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory, Link
from tests.swarm.process_swarm import ENDLESS, manifest_with

POLL_SECONDS = 0.25
MEGABITS = (20, 30, 40, 50, 60, 70, 80, 100)
DELAY = 0.02  # seconds, of what arrives
FASTEST_STEP, SLOWEST_STEP = 0.25, 2.0  # seconds
ROUND_SECONDS = 90.0
BATCH_TOKENS = 256
WAIT_FOR_START = 240.0


def step_seconds(peers: int) -> list[float]:
    """Seconds of an inner step by peer: geometric, from the fastest to the slowest."""
    ratio = SLOWEST_STEP / FASTEST_STEP
    return [FASTEST_STEP * ratio ** (index / max(1, peers - 1)) for index in range(peers)]


def make_manifest(seed: int, peers: int, round_seconds: float) -> Manifest:
    """Each peer makes the steps for which it has time in a round, and goes on while its contribution travels.

    Times of rounds and membership are those of a manifest that names none.
    """
    steps = round(round_seconds / FASTEST_STEP)
    return manifest_with(
        run={"seed": seed, "min_peers": peers},
        train={"batch_tokens": BATCH_TOKENS, "microbatch": 8, "warmup_steps": 20},
        method={"recipe": "frugal", "schedule": {"inner_steps": steps, "ahead": steps, "seconds": round_seconds}},
        round={"grace": 10.0, "leader_timeout": 5.0, "exchange_timeout": 60.0},
        membership={"heartbeat": 2.0, "expiry": 15.0},
        target={"rounds": ENDLESS},
    )


class Standing:
    """How long a peer that lives has made no step beyond the one it is at, since it first made one in this life."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.total = 0.0
        self._since: tuple[int, float] | None = None

    def record(self, step: int, now: float, step_seconds: float) -> None:
        if self._since is None:
            self._since = (step, now) if step else None
        elif step != self._since[0]:
            self._end(now, step_seconds)
            self._since = step, now

    def _end(self, now: float, step_seconds: float) -> None:
        assert self._since is not None
        waited = max(0.0, now - self._since[1] - step_seconds - 2 * POLL_SECONDS)
        self.longest, self.total = max(self.longest, waited), self.total + waited

    def reset(self, now: float, step_seconds: float) -> None:
        """The life ends here."""
        if self._since is not None:
            self._end(now, step_seconds)
        self._since = None


@dataclass
class Life:
    """Of one process: its steps count from `begun`, and from `ready` on if it has made one."""

    begun: float
    ready: float | None = None
    included: float | None = None
    ended: float | None = None
    made: int = 0  # tokens of the steps that were seen


@dataclass
class Record:
    """What was seen of a run.

    `rounds`: when each was first seen; `deaths`: when who died; `included`: when commits took how many tokens of whom;
    `tokens`: of all these; `counted`: for how many they count, because a claim weighs at most twice the median claim.
    """

    began: float = 0.0
    ended: float = 0.0
    round_seconds: float = 0.0
    tokens: int = 0
    counted: int = 0
    rounds: dict[int, float] = field(default_factory=dict)
    deaths: list[tuple[float, str]] = field(default_factory=list)
    lives: dict[str, list[Life]] = field(default_factory=dict)
    standing: dict[str, Standing] = field(default_factory=dict)
    included: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)


class Churn:
    """Draws who dies when; with every new round those of the one before come back."""

    def __init__(self, swarm: LabSwarm, record: Record, share: float, seed: int) -> None:
        self._swarm, self._record, self._share = swarm, record, share
        self._random = random.Random(seed)
        self._doomed: list[tuple[float, LabPeer]] = []
        self._dead: list[LabPeer] = []
        self._round = 0
        self._round_began = time.monotonic()

    def step(self, now: float, number: int) -> list[LabPeer]:
        """Return those that died now."""
        if number > self._round:
            length, self._round, self._round_began = now - self._round_began, number, now
            self.revive(now)
            self._doom(now, min(max(length, ROUND_SECONDS), 2 * ROUND_SECONDS))
        due = [victim for time_of_death, victim in self._doomed if time_of_death <= now]
        self._doomed = [entry for entry in self._doomed if entry[0] > now]
        for victim in due:
            victim.kill()
            self._dead.append(victim)
        return due

    def revive(self, now: float) -> None:
        self._doomed.clear()
        introducers = [peer.public_addresses()[0] for peer in self._swarm.lab_peers if self._is_at_work(peer)]
        for peer in self._dead:
            self._record.lives[peer.name].append(Life(now))
            start_played(peer, self._swarm.lab_peers.index(peer), len(self._swarm.peers), introducers)
        self._dead.clear()

    def _is_at_work(self, peer: LabPeer) -> bool:
        return peer.is_running and peer.status is not None and bool(peer.public_addresses())

    def _doom(self, now: float, length: float) -> None:
        at_work = [peer for peer in self._swarm.lab_peers if self._is_at_work(peer)]
        wanted = int(self._share * len(self._swarm.peers) + self._random.random())
        for victim in self._random.sample(at_work, min(wanted, len(at_work) - 1)):
            self._doomed.append((now + length * self._random.random(), victim))


def start_played(peer: LabPeer, index: int, peers: int, introducers: Sequence[str]) -> None:
    os.environ[STEP_VARIABLE] = str(step_seconds(peers)[index])
    peer.start(introducers)


@contextmanager
def running(seed: int, peers: int, round_seconds: float, folder: Path | None = None) -> Iterator[LabSwarm]:
    """All are there, and the first round is done."""
    with ExitStack() as stack:
        laboratory = stack.enter_context(Laboratory())
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mm", dir="/tmp")))
        os.environ[FOLDER_VARIABLE] = stack.enter_context(tempfile.TemporaryDirectory(prefix="mm", dir="/tmp"))
        links = [Link(up=rate, down=rate, delay=DELAY) for rate in MEGABITS[:peers]]
        nodes = [laboratory.node(link) for link in links]
        manifest = make_manifest(seed, peers, round_seconds)
        swarm = stack.enter_context(running_lab_swarm(place, manifest, laboratory, nodes))
        for peer in swarm.lab_peers:
            peer.replace_module(MODULE)
        first = swarm.lab_peers[0]
        start_played(first, 0, peers, ())
        swarm.wait_until(lambda: bool(first.addresses()), "the first peer has an address")
        for index, peer in enumerate(swarm.lab_peers[1:], start=1):
            start_played(peer, index, peers, first.public_addresses()[:1])
        swarm.wait_until(
            lambda: max((status.round for status in swarm.poll()), default=0) >= 1, "a round", WAIT_FOR_START
        )
        yield swarm


def observe(swarm: LabSwarm, share: float, seed: int, seconds: float) -> Record:
    """Let peers die for so many seconds, from a new round to a new round."""
    peers = swarm.lab_peers
    speeds = dict(zip((peer.name for peer in peers), step_seconds(len(peers)), strict=True))
    now = time.monotonic()
    record = Record(began=now, lives={peer.name: [Life(now, now)] for peer in peers})
    record.standing = {peer.name: Standing() for peer in peers}
    churn = Churn(swarm, record, share, seed)
    steps: dict[str, int] = {}
    while True:
        number = look(swarm, record, speeds, steps)
        now = time.monotonic()
        if record.ended:
            return record
        for victim in churn.step(now, number):
            record.deaths.append((now, victim.name))
            record.lives[victim.name][-1].ended = now
            record.standing[victim.name].reset(now, speeds[victim.name])
            print(f"{now - record.began:7.1f} {victim.name} dies", file=sys.stderr)
        if now > record.began + seconds and record.rounds.get(number, 0.0) >= now - 1.0:
            record.ended = now
            read_included(swarm, record)
            return record
        time.sleep(POLL_SECONDS)


def read_included(swarm: LabSwarm, record: Record) -> None:
    """Take in what the commits since the begin took of each peer, from the log of a peer that knows them all."""
    logs = [peer.folder / "commits.log" for peer in swarm.lab_peers]

    def newest() -> RunLedger:
        ledgers = [read_ledger(path, commit_reader, None) for path in logs if path.exists()]
        return max(ledgers, key=lambda ledger: (-ledger.missing_rounds, ledger.head.round))

    # A round is seen before its commit is in a file.
    swarm.wait_until(lambda: newest().head.round >= max(record.rounds), "the newest commit is in a log")
    works = newest().works
    first = min(record.rounds)
    for name, peer in record.ids.items():
        taken = [work for work in works.get(peer, ()) if work.round >= first and work.round + 1 in record.rounds]
        record.included[name] = [(record.rounds[work.round + 1], work.contribution.body.tokens) for work in taken]
        record.tokens += sum(work.contribution.body.tokens for work in taken)
        record.counted += sum(work.tokens for work in taken)


def look(swarm: LabSwarm, record: Record, speeds: dict[str, float], steps: dict[str, int]) -> int:
    """Take in what all peers say; return the newest round."""
    running = [peer for peer in swarm.lab_peers if peer.is_running]
    swarm.poll(*running)
    now = time.monotonic()
    statuses = {peer.name: peer.status for peer in running if peer.status is not None}
    number = max((status.round for status in statuses.values()), default=0)
    if not record.rounds:
        record.rounds[number] = now
    if number not in record.rounds:
        record.rounds[number] = now
        tokens = max(status.chain_tokens for status in statuses.values())
        print(f"{now - record.began:7.1f} round {number}, {tokens} tokens", file=sys.stderr)
    for name, status in statuses.items():
        life, record.ids[name] = record.lives[name][-1], status.peer_id
        made = status.step - steps.get(name, 0)
        if life.ready is not None and name in steps:
            life.made += max(0, made) * BATCH_TOKENS
        elif made > 0 and status.phase in ("training", "exchanging"):
            life.ready = now
            print(f"{now - record.began:7.1f} {name} trains, {now - life.begun:.1f} s after its start", file=sys.stderr)
        if life.included is None and life.ready is not None and status.contributions_included > 0:
            life.included = now
        steps[name] = status.step
        record.standing[name].record(status.step, now, speeds[name])
    return number
