"""Several real peers on this machine, watched until all have reached the run's target.

The first peer starts alone; the others are introduced by its address. One that dies by itself is started again
once. Whoever interrupts gets a polite departure; whoever interrupts twice, an immediate one. Nothing is left running.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Sequence

from node.local.drill import Drill
from node.local.peer_process import PeerProcess
from node.local.report import Outcome
from node.local.swarm_table import Display
from node.local.views import SwarmView
from protocol import errors
from protocol.manifest import Manifest

TICK = 0.5
START_DEADLINE = 90.0  # seconds until a peer answers: it imports torch on a busy machine
LEAVE_DEADLINE = 20.0
LAGGARD_DEADLINE = 180.0  # after the first peer has ended
PERSONAL = {kind.exit_code: kind for kind in errors.MurmurError.__subclasses__() if kind.exit_code > 1}


class Interrupted(Exception):  # noqa: N818 - not an error: what the person asked for
    pass


class LocalSwarm:
    """`peers` are processes not started yet. `drill` is None without a fire drill."""

    def __init__(self, manifest: Manifest, peers: Sequence[PeerProcess], display: Display, drill: Drill | None) -> None:
        self._manifest = manifest
        self._peers = tuple(peers)
        self._display = display
        self._drill = drill
        self._began = time.monotonic()
        self._first_end: float | None = None
        self._revived: set[str] = set()
        self._expected_dead: PeerProcess | None = None  # the drill's victim while it is down
        self._tokens_before: int | None = None
        self._stop = asyncio.Event()
        self._stop_at_once = asyncio.Event()

    async def run(self) -> Outcome:
        """Until every peer has ended well. Raises Interrupted, or MurmurError when a peer cannot be kept alive."""
        async with self._signals():
            try:
                await self._start_all()
                while not await self._tick():
                    await self._pause(TICK)
                await self._tick()  # reads what they left behind when they ended
            finally:
                await self._leave()
        return self._outcome()

    async def _start_all(self) -> None:
        first, *others = self._peers
        first.start(())
        await self._answers(first)
        for peer in others:
            peer.start(first.addresses()[:1])

    async def _answers(self, peer: PeerProcess) -> None:
        """Wait until the peer tells its status and an address, or has ended: the run had reached its target before."""
        deadline = time.monotonic() + START_DEADLINE
        while not (peer.status and peer.addresses()):
            if peer.returncode == 0:
                return
            if peer.returncode is not None:
                raise _death(peer)
            if time.monotonic() > deadline:
                raise errors.MurmurError(f"{peer.name} does not answer after {START_DEADLINE:.0f} s; see {peer.log}")
            await peer.poll()
            self._display.show(self._view())
            await self._pause(0.1)

    async def _tick(self) -> bool:
        """Look at all peers once, act on what is seen; True when all have ended well."""
        await asyncio.gather(*(peer.poll() for peer in self._peers))
        view = self._view()
        self._display.show(view)
        self._note_tokens_before()
        for peer in self._peers:
            if peer.returncode not in (None, 0) and peer is not self._expected_dead:
                self._revive(peer)
        self._drive_drill(view)
        return self._all_ended()

    def _drive_drill(self, view: SwarmView) -> None:
        order = self._drill.decide(view) if self._drill else None
        if order is None:
            return
        victim = self._peers[-1]
        self._display.say(order.text)
        if order.action == "kill":
            self._expected_dead = victim
            victim.kill()
        elif order.action == "start":
            self._start_again(victim)
            self._expected_dead = None

    def _revive(self, peer: PeerProcess) -> None:
        """Once; a death for a reason that a person must mend is final."""
        if peer.name in self._revived or peer.returncode in PERSONAL:
            raise _death(peer)
        self._revived.add(peer.name)
        self._display.say(f"{peer.name} died (exit {peer.returncode}) and is started again; its last words:")
        for line in peer.last_words():
            self._display.say(f"    {line}")
        self._start_again(peer)

    def _start_again(self, peer: PeerProcess) -> None:
        addresses = (other.addresses()[:1] for other in self._peers if other is not peer and other.running)
        peer.start([address for found in addresses for address in found])

    def _all_ended(self) -> bool:
        ended = [peer for peer in self._peers if peer.returncode == 0]
        if len(ended) == len(self._peers):
            return True
        if ended and self._first_end is None:
            self._first_end = time.monotonic()
        if self._first_end is not None and time.monotonic() - self._first_end > LAGGARD_DEADLINE:
            late = ", ".join(peer.name for peer in self._peers if peer not in ended)
            raise errors.MurmurError(f"{late} did not reach the target; see {self._peers[-1].folder.parent}/peer-*/log")
        return False

    def _note_tokens_before(self) -> None:
        """The chain as the first working peer found it: a resumed swarm has paid for those tokens before."""
        for peer in self._peers:
            status = peer.status
            if self._tokens_before is None and status and status.phase not in ("starting", "joining"):
                self._tokens_before = status.chain_tokens

    def _view(self) -> SwarmView:
        target = self._manifest.target
        elapsed = time.monotonic() - self._began
        views = tuple(peer.view() for peer in self._peers)
        return SwarmView(self._manifest.run.name, target.rounds, target.tokens, elapsed, views)

    def _outcome(self) -> Outcome:
        return Outcome(
            ledgers=[peer.ledger for peer in self._peers],
            digests={peer.status.peer_id: peer.status.digest for peer in self._peers if peer.status},
            tokens=self._view().tokens,
            tokens_before=self._tokens_before or 0,
            peers_lost=(self._drill.lost if self._drill else 0) + len(self._revived),
            peers_rejoined=(self._drill.rejoined if self._drill else 0) + len(self._revived),
            seconds=time.monotonic() - self._began,
        )

    async def _leave(self) -> None:
        """Ask all that still run to leave; kill what has not left in time."""
        for peer in self._peers:
            peer.interrupt()
        deadline = time.monotonic() + LEAVE_DEADLINE
        while any(peer.running for peer in self._peers) and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_at_once.wait(), 0.05)
            if self._stop_at_once.is_set():
                break
        for peer in self._peers:
            peer.kill()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        if self._stop.is_set():
            raise Interrupted

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for kind in kinds:
            loop.add_signal_handler(kind, self._interrupted)
        try:
            yield
        finally:
            for kind in kinds:
                loop.remove_signal_handler(kind)

    def _interrupted(self) -> None:
        if self._stop.is_set():
            self._stop_at_once.set()
            return
        self._stop.set()
        self._display.say("leaving; interrupt once more to leave at once")


def _death(peer: PeerProcess) -> errors.MurmurError:
    """The error that a peer's death is for the person, with the kind and the words it ended with."""
    code = peer.returncode or 0
    words = [line for line in peer.last_words() if line.startswith("murmur: ")]
    if code in PERSONAL and words:
        return PERSONAL[code](words[-1].removeprefix("murmur: "))
    return errors.MurmurError(f"{peer.name} died (exit {code}) and cannot be kept alive; see {peer.log}")
