"""A stranger: an identity that speaks the protocol with the product's transport and gossip, and trains nothing.

An attack is a coroutine that takes a `Stranger`. The process of a stranger runs one attack until it is killed.
"""

import asyncio
import importlib
import json
import os
import random
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from node.daemon.peers.peer_rpc import await_reply
from node.daemon.run_limits import contribution_limits
from node.from_manifest import build_program
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.identity import Identity, PeerId
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip import DirectoryOptions
from protocol.murmur_pb2 import GossipRequest, PeerRecord, Signed
from protocol.murmur_pb2_grpc import MembershipStub
from protocol.signing import sign
from protocol.transport.transport import AddServicer, Transport

CALL_SECONDS = 5.0
LISTEN = "/ip4/127.0.0.1/tcp/0"
Attack = Callable[["Stranger"], Awaitable[None]]


def main(target: str, home: str, run: str, addresses: Sequence[str], options: Mapping[str, Any]) -> None:
    """Run the attack `target`, a `module:function`, until this process is killed."""
    module, _, function = target.partition(":")
    attack: Attack = getattr(importlib.import_module(module), function)
    folder = Path(home)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder.parent / "t")
    asyncio.run(_attack(attack, folder, Path(run), addresses, options))


async def _attack(attack: Attack, home: Path, run: Path, addresses: Sequence[str], options: Mapping[str, Any]) -> None:
    await attack(Stranger(home, load_manifest(run), addresses, options, run))
    await asyncio.Event().wait()


class Stranger:
    """One identity with a transport; `services` may be extended before `open`."""

    def __init__(
        self,
        home: Path,
        manifest: Manifest,
        addresses: Sequence[str],
        options: Mapping[str, Any],
        run: Path | None = None,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.home = home
        self.manifest = manifest
        self.run = run  # the file of the manifest; None for further identities of an attack
        self.run_id = manifest.run_id
        self.addresses = tuple(addresses)  # of the honest peers
        self.options = options
        self.identity = Identity.load_or_create(home / "key")
        self.transport = Transport.create(home / "key", home)
        self.clock = SwarmClock()
        self.directory = PeerDirectory(
            DirectoryOptions(
                run_id=self.run_id,
                heartbeat=manifest.membership.heartbeat,
                expiry=manifest.membership.expiry,
                bootstrap=addresses,
            ),
            self.identity,
            self.transport,
            self.clock,
            random.Random(),
        )
        self.services: list[AddServicer] = [self.directory.register]
        self._facts: dict[str, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def victims(self) -> list[PeerId]:
        return [address.rpartition("/p2p/")[2] for address in self.addresses]

    @property
    def limits(self) -> ContributionLimits:
        return contribution_limits(self.manifest, build_program(self.manifest))

    async def open(self, gossips: bool = True) -> None:
        """Go on the network; `gossips` starts to take part in the directory as an observer."""
        await self.transport.open(self.services, listen=(LISTEN,))
        for address in self.addresses:
            self.transport.introduce(address.rpartition("/p2p/")[2], [address])
        if gossips:
            self.spawn(self.directory.run())

    def with_others(self, count: int) -> list["Stranger"]:
        """Return `count` identities, this one first; the others are new."""
        others = (Stranger(self.home / str(number), self.manifest, self.addresses, {}) for number in range(count - 1))
        return [self, *others]

    async def meet(self) -> dict[PeerId, PeerRecord]:
        """Wait until the records of all honest peers are here, and return them."""
        while not set(self.victims) <= self.directory.live().keys():
            await asyncio.sleep(0.02)
        return {peer: self.directory.live()[peer] for peer in self.victims}

    def spawn(self, work: Awaitable[Any]) -> None:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            traceback.print_exception(task.exception())

    def begin(self) -> None:
        """Tell the test that the attack has begun."""
        (self.home / "began").touch()

    def note(self, **facts: float) -> None:
        """Tell the test what was measured."""
        self._facts |= facts
        (self.home / "facts.tmp").write_text(json.dumps(self._facts))
        os.replace(self.home / "facts.tmp", self.home / "facts.json")

    def record_of(self, identity: Identity, **fields: Any) -> Signed:
        """Return a fresh record of any identity."""
        now = self.clock.now()
        expires = now + self.manifest.membership.expiry
        values: dict[str, Any] = {"sequence": int(now * 1000), "expires": expires, "role": "trainer"}
        return sign(identity, "peer", self.run_id, PeerRecord(**(values | fields)))

    async def push_records(self, victim: PeerId, records: Sequence[Signed], offset: float = 0.0) -> None:
        """Gossip records of any identities to a peer, in a call of this one. Raises UnreachableError or PeerFault."""
        request = GossipRequest(run=bytes.fromhex(self.run_id), time=time.time() + offset, records=records)
        stub = MembershipStub(self.transport.channel(victim))
        await await_reply(victim, lambda: stub.Gossip(request, timeout=CALL_SECONDS))


async def open_together(strangers: Sequence[Stranger]) -> None:
    """Go on the network with several identities, each of which meets the honest peers."""
    await asyncio.gather(*(stranger.open() for stranger in strangers))
    for stranger in strangers:
        await stranger.meet()
