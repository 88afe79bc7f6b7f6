"""A swarm of three honest peers, and perhaps one hostile node among them, that attacks are tried on."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from node.commands.up.peer_process import PeerProcess
from node.options import LISTEN_ON_LOOPBACK
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from tests.hostile.peers import ROUNDS_FILE
from tests.hostile.scoreboard import RoundLine, count_foreign_rounds, read_rounds
from tests.hostile.switches import set_switches, was_used
from tests.hostile.template import ForkedProcess, Template
from tests.swarm.process_swarm import ENDLESS, manifest_with, write_run

HONEST = 3
HONEST_AT_A_STAGE = 2
START_SECONDS = 90.0
POLL_SECONDS = 0.02
GROUND_KEYS = 200
ROUND = {"grace": 1.0, "leader_timeout": 1.0, "exchange_timeout": 5.0}
STATUS_TABLES = ("refusals", "setbacks", "absences", "direct_refusals", "microbatches")


def small_manifest(**changes: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a run with rounds of about 0.4 s."""
    tables: dict[str, Mapping[str, Any]] = {"target": {"rounds": ENDLESS}, "round": ROUND}
    for table, keys in changes.items():
        tables[table] = {**tables.get(table, {}), **keys}
    return manifest_with(**tables)


def _grind_key(folder: Path) -> None:
    """Give a node the lowest of many keys: an order of peer ids is an attacker's choice."""
    lowest = min((Identity.create() for _ in range(GROUND_KEYS)), key=lambda identity: identity.peer_id)
    folder.mkdir(parents=True, mode=0o700)
    (folder / "key").write_bytes(lowest.to_bytes())
    (folder / "key").chmod(0o600)


class ForkedPeer(PeerProcess):
    """A peer that the template forks instead of starting a Python of its own."""

    def __init__(
        self, name: str, folder: Path, template: Template, target: str, run: Path, stage: int | None = None
    ) -> None:
        super().__init__(name, folder, ())
        self.stage = stage
        self._template = template
        self._target = target
        self._words = [str(run), "--dir", str(folder), "--name", name, "--listen", LISTEN_ON_LOOPBACK]
        self._words += [] if stage is None else ["--stage", str(stage)]
        self._forked: ForkedProcess | None = None

    def start(self, bootstrap: Sequence[str], niceness: int = 0) -> None:
        self.status = None
        self._started_at = time.time()
        options = [word for address in bootstrap for word in ("--peer", address)]
        arguments = [*self._words, "--device", "cpu", "--threads", "1", *options]
        temporary = str(self.folder.parent / "t")
        os.makedirs(temporary, exist_ok=True)
        self._forked = self._template.fork(self._target, [str(self.folder), temporary, arguments], self.log, niceness)
        self._process = self._forked  # type: ignore[assignment]

    def kill(self) -> None:
        if self._forked is not None:
            self._forked.kill()

    def interrupt(self) -> None:
        if self._forked is not None:
            self._forked.send_signal(signal.SIGINT)

    @property
    def pid(self) -> int:
        assert self._forked is not None
        return self._forked.pid

    def switch_on(self, *names: str) -> None:
        set_switches(self.folder, *names)

    def has_used(self, name: str) -> bool:
        return was_used(self.folder, name)

    @property
    def rounds(self) -> list[RoundLine]:
        return read_rounds(self.folder / ROUNDS_FILE)


class Arena:
    """The honest peers, the hostile node if `has_member`, and the strangers that an attack starts."""

    def __init__(
        self, template: Template, folder: Path, manifest: Manifest, has_member: bool, stages: int = 0, stage: int = 0
    ) -> None:
        """`stages`: of a pipeline, 0 if there is none; `stage`: that of the hostile node."""
        self.manifest = manifest
        self.run = write_run(folder, manifest)
        self._template = template
        seats = [number % stages for number in range(HONEST_AT_A_STAGE * stages)] if stages else [None] * HONEST
        self.honest = [self._make_peer(f"honest-{index}", "honest", seat) for index, seat in enumerate(seats)]
        self.member = self._make_peer("hostile", "hostile", stage if stages else None) if has_member else None
        if self.member is not None:
            _grind_key(self.member.folder)
        self._log_bytes_before = 0
        self._strangers: list[tuple[Path, ForkedProcess]] = []

    def _make_peer(self, name: str, kind: str, stage: int | None = None) -> ForkedPeer:
        return ForkedPeer(name, self.run.parent / name, self._template, f"tests.hostile.peers:{kind}", self.run, stage)

    @property
    def trainers(self) -> list[ForkedPeer]:
        return [*self.honest, *([self.member] if self.member else [])]

    def start(self, rules_off: Sequence[str] = ()) -> None:
        """Start all trainers, and wait until they have decided two rounds together."""
        for peer in self.honest:
            peer.switch_on(*rules_off)
        first, *others = self.trainers
        first.start(())
        self.wait_until(lambda: bool(first.addresses()), "the first peer has an address")
        for peer in others:
            peer.start(first.addresses()[:1])
        self.wait_until(self._are_together, "all peers contribute to the rounds")

    def _are_together(self) -> bool:
        everybody = Counter(peer.stage for peer in self.trainers)
        lines = [(peer.stage, peer.rounds[-1:]) for peer in self.honest]
        return all(line and line[0].round >= 4 and len(line[0].senders[-1]) == everybody[at] for at, line in lines)

    def start_strangers(
        self, target: str, options: Mapping[str, Any], niceness: int, seconds: float = START_SECONDS
    ) -> ForkedProcess:
        """Start the program of one or many strangers, and wait until it says that the attack has begun."""
        self._log_bytes_before = self._log_bytes()
        home = self.run.parent / f"stranger-{len(self._strangers)}"
        addresses = [address for peer in self.honest for address in peer.addresses()[:1]]
        arguments = [target, str(home), str(self.run), addresses, dict(options)]
        process = self._template.fork("tests.hostile.attackers.stranger:main", arguments, home / "log", niceness)
        self._strangers.append((home, process))
        self.wait_until(lambda: (home / "began").exists() or process.poll() is not None, "the attack begins", seconds)
        if process.poll() is not None:
            raise RuntimeError(f"the attacker has ended\n{self.describe()}")
        return process

    def wait_until_member_lies(self, name: str) -> None:
        """Wait until the hostile node has told its lie: it may have to lead a round first, or to reduce a part."""
        member = self.member
        assert member is not None
        self.wait_until(lambda: member.has_used(name), f"the hostile node does {name}")

    def stop_strangers(self) -> None:
        for _, process in self._strangers:
            process.kill()

    def wait_until_recovered(self) -> None:
        """Wait until the peers decide rounds together again, without a stranger."""
        last = max(line.round for peer in self.honest for line in peer.rounds)
        self.wait_until(
            lambda: self._are_together() and all(peer.rounds[-1].round > last + 2 for peer in self.honest),
            "the peers recover from the last attack",
        )

    def facts(self) -> dict[str, float]:
        """Return what strangers measured, whether the hostile node still counts, and how much honest peers logged."""
        found: dict[str, float] = {"log_bytes": float(self._log_bytes() - self._log_bytes_before)}
        if self.member is not None:
            found["trusted"] = float(self._counts(self.member))
        for home, _ in self._strangers:
            path = home / "facts.json"
            found |= json.loads(path.read_text()) if path.exists() else {}
        return found

    def _counts(self, member: ForkedPeer) -> bool:
        """Return whether an honest peer of its stage still takes the contributions of the hostile node."""
        key = Identity.load_or_create(member.folder / "key").peer_id
        heads = [peer.rounds[-1:] for peer in self.honest if peer.stage == member.stage]
        return any(key in senders for lines in heads for line in lines for senders in line.senders)

    def _log_bytes(self) -> int:
        return sum(peer.log.stat().st_size for peer in self.honest)

    def rounds(self) -> dict[str, list[RoundLine]]:
        return {peer.name: peer.rounds for peer in self.honest}

    def rounds_by_stage(self) -> list[dict[str, list[RoundLine]]]:
        """Return the rounds of the peers that have to decide alike."""
        stages = dict.fromkeys(peer.stage for peer in self.honest)
        return [{peer.name: peer.rounds for peer in self.honest if peer.stage == stage} for stage in stages]

    def foreign_rounds(self, since: float) -> int:
        """Return how many rounds of the honest peers have a contribution of a stranger."""
        trainers = {Identity.load_or_create(peer.folder / "key").peer_id for peer in self.trainers}
        return count_foreign_rounds(self.rounds(), since, trainers)

    def counters(self) -> Counter[str]:
        """Return the sums over the honest peers of all their counters of trouble."""
        total = Counter[str]()
        for status in self.statuses():
            for table in STATUS_TABLES:
                total.update({f"{table}: {name}": count for name, count in getattr(status, table).items()})
        return total

    def statuses(self) -> list[Any]:
        async def ask() -> None:
            await asyncio.gather(*(peer.poll() for peer in self.honest))

        asyncio.run(ask())
        return [peer.status for peer in self.honest if peer.status]

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"not in {seconds:g} s: {what}\n{self.describe()}")
            time.sleep(POLL_SECONDS)

    def describe(self) -> str:
        """Return the last words of everybody."""
        logs = [(peer.name, peer.log) for peer in self.trainers]
        logs += [(home.name, home / "log") for home, _ in self._strangers]
        return "\n".join(
            f"{name}:\n" + "\n".join(f"    {line}" for line in log.read_text().splitlines()[-40:])
            for name, log in logs if log.exists()
        )  # fmt: skip

    def close(self) -> None:
        """Kill everybody."""
        self.stop_strangers()
        for peer in self.trainers:
            peer.kill()
