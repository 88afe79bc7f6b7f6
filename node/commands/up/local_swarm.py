"""The local swarm of `murmur up`: the peers' processes, their restarts, and the test that kills one of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from node.commands.up.peer_process import PeerProcess
from node.commands.up.report import SwarmResult
from node.commands.up.swarm_summary import PeerSummary, SwarmDisplay, SwarmSummary
from node.processes.process import handle_stop_signals
from node.units import format_plural
from protocol import errors
from protocol.manifest.run import Manifest

RESTART_AFTER_SECONDS = 60.0  # restart the victim anyway if the others cannot continue without it
ROUNDS_ALONE = 1  # rounds without the victim before it returns, if the others have noticed its absence
ROUNDS_UNNOTICED = 3  # the same if the victim's record has not expired yet
MIN_ROUNDS_LEFT = 3  # restart the victim while it can still take part in this many rounds
TICK_SECONDS = 0.5
START_SECONDS = 300.0  # until a peer must answer; it imports torch, on a busy machine or from a slow disk
LEAVE_SECONDS = 20.0
LAGGARD_SECONDS = 180.0  # after the first peer has ended


@dataclass(frozen=True)
class KillTestAction:
    """An action on the victim and the line that announces it."""

    action: Literal["kill", "start", "none"]
    text: str


class KillTest:
    """The state machine of the kill test.

    The victim is the last peer, because the others bootstrap from the first one.
    """

    def __init__(self, peers: int) -> None:
        self._victim = peers - 1
        self._stage: Literal["armed", "lost", "returning", "over"] = "armed"
        self._stage_round = 0  # the round of the others when the stage began
        self._stage_started = 0.0

    @property
    def lost_count(self) -> int:
        return int(self._stage != "armed")

    @property
    def rejoined_count(self) -> int:
        return int(self._stage == "over")

    def next_action(self, swarm: SwarmSummary) -> KillTestAction | None:
        """Return the next action for a new summary of the swarm, or `None`."""
        victim = swarm.peers[self._victim]
        others = swarm.peers[: self._victim]
        if self._stage == "armed":
            return self._kill_half_way(swarm, victim)
        if self._stage == "lost":
            return self._restart_when_due(swarm, victim, others)
        if self._stage == "returning":
            return self._confirm_rejoined(victim, others)
        return None

    def _kill_half_way(self, swarm: SwarmSummary, victim: PeerSummary) -> KillTestAction | None:
        if swarm.progress < 0.5 or victim.state != "running" or not self._victim:
            return None
        self._enter_stage("lost", swarm)
        return KillTestAction("kill", f"drill: killed {victim.name} in round {swarm.round}")

    def _restart_when_due(
        self, swarm: SwarmSummary, victim: PeerSummary, others: tuple[PeerSummary, ...]
    ) -> KillTestAction | None:
        alone = min(peer.round for peer in others) - self._stage_round
        noticed = all(peer.status and peer.status.peers <= len(others) for peer in others)
        left = swarm.target_rounds - swarm.round if swarm.target_rounds else MIN_ROUNDS_LEFT + 1
        enough = alone >= (ROUNDS_ALONE if noticed or left <= MIN_ROUNDS_LEFT else ROUNDS_UNNOTICED)
        late = swarm.elapsed - self._stage_started > RESTART_AFTER_SECONDS
        if not (enough or late):
            return None
        self._enter_stage("returning", swarm)
        reason = f"the others finished {format_plural(alone, 'round')} without it" if enough else "the others wait"
        return KillTestAction("start", f"drill: {reason}; restarting {victim.name}")

    def _confirm_rejoined(self, victim: PeerSummary, others: tuple[PeerSummary, ...]) -> KillTestAction | None:
        status = victim.status
        if status is None or status.last_included_round is None or status.last_included_round < self._stage_round:
            return None
        # Rounds that it commits alone after the others have ended do not count: its state must equal another peer's.
        at_same_round = (peer.status for peer in others if peer.status and peer.status.round == status.round)
        if not any(other.digest == status.digest for other in at_same_round):
            return None
        self._stage = "over"
        return KillTestAction("none", f"drill: {victim.name} is back in round {status.round} and contributes")

    def _enter_stage(self, stage: Literal["lost", "returning"], swarm: SwarmSummary) -> None:
        self._stage = stage
        self._stage_round = swarm.round
        self._stage_started = swarm.elapsed


ERRORS_FOR_THE_USER = {kind.exit_code: kind for kind in errors.MurmurError.__subclasses__() if kind.exit_code > 1}


class Interrupted(Exception):  # noqa: N818 - not an error, but a request of the user
    """The user interrupted the swarm."""


class LocalSwarm:
    """Starts, watches, restarts and stops the peer processes of one swarm.

    `peers` are not started yet; `kill_test` is `None` for a swarm without a kill test; `entry_points` are addresses of
    a node outside the swarm that every peer may ask first.
    """

    def __init__(
        self,
        manifest: Manifest,
        peers: Sequence[PeerProcess],
        display: SwarmDisplay,
        kill_test: KillTest | None,
        entry_points: Sequence[str] = (),
    ) -> None:
        self._manifest = manifest
        self._peers = tuple(peers)
        self._display = display
        self._kill_test = kill_test
        self._entry_points = tuple(entry_points)
        self._started_at = time.monotonic()
        self._first_ended_at: float | None = None
        self._restarted: set[str] = set()
        self._killed_by_test: PeerProcess | None = None  # the victim while it is down
        self._tokens_before: int | None = None
        self._stop = asyncio.Event()
        self._stop_at_once = asyncio.Event()

    async def run(self) -> SwarmResult:
        """Run until every peer has ended successfully.

        Raises Interrupted, or MurmurError if a peer cannot be kept alive.
        """
        async with self._handle_signals():
            try:
                await self._start_all()
                while not await self._tick():
                    await self._sleep(TICK_SECONDS)
                await self._tick()  # reads the final status of each peer
            finally:
                await self._stop_all()
        return self._result()

    async def _start_all(self) -> None:
        first, *others = self._peers
        first.start(self._entry_points)
        await self._wait_until_ready(first)
        for peer in others:
            peer.start([*first.addresses()[:1], *self._entry_points])

    async def _wait_until_ready(self, peer: PeerProcess) -> None:
        """Wait until the peer has a status and an address, or has ended because the run had reached its target."""
        deadline = time.monotonic() + START_SECONDS
        while not (peer.status and peer.addresses()):
            if peer.returncode == 0:
                return
            if peer.returncode is not None:
                raise _death_error(peer)
            if time.monotonic() > deadline:
                raise errors.MurmurError(f"{peer.name} does not answer after {START_SECONDS:.0f} s; see {peer.log}")
            await peer.poll()
            self._display.show(self._summary())
            await self._sleep(0.1)

    async def _tick(self) -> bool:
        """Poll all peers once and act on the result; returns whether all have ended successfully."""
        await asyncio.gather(*(peer.poll() for peer in self._peers))
        summary = self._summary()
        self._display.show(summary)
        self._record_tokens_before()
        for peer in self._peers:
            if peer.returncode not in (None, 0) and peer is not self._killed_by_test:
                self._restart_once(peer)
        self._run_kill_test(summary)
        return self._have_all_ended()

    def _run_kill_test(self, swarm: SwarmSummary) -> None:
        step = self._kill_test.next_action(swarm) if self._kill_test else None
        if step is None:
            return
        victim = self._peers[-1]
        self._display.print_line(step.text)
        if step.action == "kill":
            self._killed_by_test = victim
            victim.kill()
        elif step.action == "start":
            self._restart(victim)
            self._killed_by_test = None

    def _restart_once(self, peer: PeerProcess) -> None:
        """Restart a dead peer. Raises its error at the second death, or if the user must fix the cause."""
        if peer.name in self._restarted or peer.returncode in ERRORS_FOR_THE_USER:
            raise _death_error(peer)
        self._restarted.add(peer.name)
        self._display.print_line(f"{peer.name} died (exit {peer.returncode}); restarting it; the end of its log:")
        for line in peer.log_tail():
            self._display.print_line(f"    {line}")
        self._restart(peer)

    def _restart(self, peer: PeerProcess) -> None:
        addresses = (other.addresses()[:1] for other in self._peers if other is not peer and other.is_running)
        peer.start([*(address for found in addresses for address in found), *self._entry_points])

    def _have_all_ended(self) -> bool:
        ended = [peer for peer in self._peers if peer.returncode == 0]
        if len(ended) == len(self._peers):
            return True
        if ended and self._first_ended_at is None:
            self._first_ended_at = time.monotonic()
        if self._first_ended_at is not None and time.monotonic() - self._first_ended_at > LAGGARD_SECONDS:
            late = ", ".join(peer.name for peer in self._peers if peer not in ended)
            raise errors.MurmurError(f"{late} did not reach the target; see {self._peers[-1].folder.parent}/peer-*/log")
        return False

    def _record_tokens_before(self) -> None:
        """Record the chain's tokens at the start: a resumed swarm trained on those tokens before."""
        for peer in self._peers:
            status = peer.status
            if self._tokens_before is None and status and status.phase not in ("starting", "joining"):
                self._tokens_before = status.chain_tokens

    def _summary(self) -> SwarmSummary:
        known = next((peer.status for peer in self._peers if peer.status), None)
        target = self._manifest.target
        rounds = known.target_rounds if known else target.rounds  # the organiser may have moved it
        tokens = known.target_tokens if known else target.tokens
        elapsed = time.monotonic() - self._started_at
        peers = tuple(peer.summary() for peer in self._peers)
        return SwarmSummary(self._manifest.run.name, rounds, tokens, elapsed, peers)

    def _result(self) -> SwarmResult:
        return SwarmResult(
            peer_totals=[peer.totals for peer in self._peers],
            digests={peer.status.peer_id: peer.status.digest for peer in self._peers if peer.status},
            stages={
                peer.status.peer_id: peer.status.stage
                for peer in self._peers
                if peer.status and peer.status.stage is not None
            },
            tokens=self._summary().tokens,
            tokens_before=self._tokens_before or 0,
            peers_lost=(self._kill_test.lost_count if self._kill_test else 0) + len(self._restarted),
            peers_rejoined=(self._kill_test.rejoined_count if self._kill_test else 0) + len(self._restarted),
            seconds=time.monotonic() - self._started_at,
        )

    async def _stop_all(self) -> None:
        """Ask all running peers to leave; kill those that do not leave in time."""
        for peer in self._peers:
            peer.interrupt()
        deadline = time.monotonic() + LEAVE_SECONDS
        while any(peer.is_running for peer in self._peers) and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_at_once.wait(), 0.05)
            if self._stop_at_once.is_set():
                break
        for peer in self._peers:
            peer.kill()

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        if self._stop.is_set():
            raise Interrupted

    @contextlib.asynccontextmanager
    async def _handle_signals(self) -> AsyncIterator[None]:
        stop_handling = handle_stop_signals(asyncio.get_running_loop(), self._on_signal, self._stop_at_once.set)
        try:
            yield
        finally:
            stop_handling()

    def _on_signal(self) -> None:
        self._stop.set()
        self._display.print_line("Shutting down. Press Ctrl-C again to exit immediately.")


def _death_error(peer: PeerProcess) -> errors.MurmurError:
    """Return the error to show for a dead peer: its own error with the same exit code if it printed one."""
    code = peer.returncode or 0
    error_lines = [line for line in peer.log_tail() if line.startswith("murmur: ")]
    if code in ERRORS_FOR_THE_USER and error_lines:
        return ERRORS_FOR_THE_USER[code](error_lines[-1].removeprefix("murmur: "))
    return errors.MurmurError(f"{peer.name} died (exit {code}) and cannot be kept alive; see {peer.log}")
