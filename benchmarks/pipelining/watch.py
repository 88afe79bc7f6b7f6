"""Measure how late the event loop and small calls of a peer are while activations pass through it."""

import asyncio
import statistics
from collections.abc import Sequence

from node.daemon.stages.calls import StageCalls
from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.membership.directory import PeerDirectory
from protocol.membership.peer_table import MembershipEvent, PeerLeft

SLEEP_SECONDS, CALL_SECONDS = 0.01, 0.1  # between two samples
UNUSED_SERIAL = 1


class Watch:
    """Samples one peer: delays of its event loop, seconds of small calls to the others, and peers that seem gone."""

    def __init__(self, directory: PeerDirectory, calls: StageCalls, run: RunId) -> None:
        self._directory = directory
        self._calls = calls
        self._run = run
        self.is_idle = True
        self.clear()
        directory.subscribe(self)

    def clear(self) -> None:
        """Begin a new window."""
        self._delays: list[float] = []
        self._call_seconds: list[float] = []
        self._failed_calls = self._peers_left = 0

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        self._peers_left += sum(isinstance(event, PeerLeft) for event in events)

    async def sample_loop(self) -> None:
        self.is_idle = False
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + SLEEP_SECONDS
            await asyncio.sleep(SLEEP_SECONDS)
            self._delays.append(max(0.0, clock() - due))

    async def sample_calls(self) -> None:
        """Call the other peers in turn, as rounds and gossip do: small, unary and with a deadline."""
        while True:
            for peer in [peer for peer in self._directory.live() if peer != self._directory.peer_id]:
                await self._sample_call(peer)
            await asyncio.sleep(CALL_SECONDS)

    async def _sample_call(self, peer: PeerId) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await self._calls.release(peer, self._run, [UNUSED_SERIAL])
        except UnreachableError:
            self._failed_calls += 1
        self._call_seconds.append(clock() - began)

    def figures(self) -> dict[str, float]:
        """Return the figures of the window; times are in milliseconds."""
        return {
            "loop_delay_ms": 1000 * max(self._delays, default=0.0),
            "loop_delay_ms_p99": 1000 * _percentile(self._delays),
            "call_ms": 1000 * max(self._call_seconds, default=0.0),
            "call_ms_p99": 1000 * _percentile(self._call_seconds),
            "failed_calls": self._failed_calls,
            "peers_left": self._peers_left,
        }


def _percentile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1] if len(values) > 1 else 0.0
