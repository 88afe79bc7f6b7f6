"""Probe the peers of a run: whether they answer, how they see this machine, their bandwidth and their clocks.

The probe uses a temporary key, because the user has not joined yet. It is bounded in bytes, peers and seconds.
"""

import asyncio
import logging
import math
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc

from node.commands.doctor.checks import (
    Check,
    judge_addresses,
    judge_bandwidth,
    judge_clock,
    judge_dial_back,
    judge_nat,
    judge_peers,
    judge_public_peers,
    judge_versions,
)
from node.commands.join.invitation import Invitation
from node.daemon.peers.peer_rpc import await_reply, request_chain, request_peer_table
from protocol.blobs.blob import Blob
from protocol.errors import MurmurError, PeerFault, UnreachableError, require_reply
from protocol.identity import PeerId
from protocol.membership.peer_table import PeerTable
from protocol.murmur_pb2 import (
    DialBackReply,
    DialBackRequest,
    FetchRequest,
    PeerRecord,
)
from protocol.murmur_pb2_grpc import BlobsStub, RunsStub
from protocol.transport.nat import is_public_address
from protocol.transport.transport import Transport

logger = logging.getLogger(__name__)

DIAL_SECONDS = 10.0
CALL_SECONDS = 15.0
MAX_DIALLED = 8
MAX_QUERIED_PEERS = 2  # to dial us back, and to download from
FETCH_BYTES = 8 << 20
FETCH_SECONDS = 6.0
FETCH_ATTEMPTS = 3
MAX_STATE_GRACES = 10  # a start is slow if the download of the state takes more than this many graces of a round
Connect = Callable[[str, float], Coroutine[Any, Any, str]]


@dataclass
class RunProbe:
    """One probe of a run with its own transport; `records` are the peers' records of each other."""

    transport: Transport
    invitation: Invitation
    reached: dict[PeerId, str] = field(default_factory=dict)
    records: dict[PeerId, PeerRecord] = field(default_factory=dict)
    clock_offsets: list[float] = field(default_factory=list)

    @property
    def _run(self) -> bytes:
        return bytes.fromhex(self.invitation.manifest.run_id)

    async def collect_findings(self) -> list[Check]:
        """Run all checks that the reachable peers allow."""
        contacts = (*self.invitation.peers, *self.invitation.manifest.run.bootstrap)[:MAX_DIALLED]
        attempts = await dial_all(self.transport.connect, contacts)
        found = [judge_peers(attempts)]
        self._record_reached(attempts)
        if not self.reached:
            return [*found, judge_addresses(await self.transport.addresses())]
        await asyncio.gather(*(self._fetch_peer_table(peer) for peer in list(self.reached)))
        self._record_reached(await dial_all(self.transport.connect, self._further_addresses()))
        found.append(judge_public_peers(self.reached.values()))
        if self.clock_offsets:
            found.append(judge_clock(self.clock_offsets, "the run's peers"))
        found += await self._check_reachability()
        versions = judge_versions(version("murmuration"), {record.version for record in self.records.values()})
        return [*found, *(finding for finding in (versions, await self._measure_bandwidth()) if finding)]

    def _record_reached(self, attempts: Sequence[tuple[str, float | str]]) -> None:
        for address, result in attempts:
            if isinstance(result, float):
                self.reached.setdefault(address.rpartition("/p2p/")[2], address)

    def _further_addresses(self) -> list[str]:
        """Return addresses of known peers that were not dialled yet, trainers first."""
        unreached = [(peer, record) for peer, record in self.records.items() if peer not in self.reached]
        unreached.sort(key=lambda entry: entry[1].role != "trainer")
        return [record.addresses[0] for _, record in unreached if record.addresses][:MAX_DIALLED]

    async def _fetch_peer_table(self, peer: PeerId) -> None:
        """Read the peer's table, and compare our clock with the peer's."""
        sent, manifest = time.time(), self.invitation.manifest
        try:
            reply = await request_peer_table(manifest.run_id, self.transport.channel, peer, CALL_SECONDS)
        except (UnreachableError, PeerFault) as error:
            logger.info("%s does not send its peer table: %s", peer, error)
            return
        if math.isfinite(reply.time):
            self.clock_offsets.append((sent + time.time()) / 2 - reply.time)
        table = PeerTable(manifest.run_id, manifest.membership.expiry)
        for signed in reply.records:
            try:
                table.merge(signed, reply.time)
            except PeerFault as fault:
                logger.info("refused a record from %s: %s", peer, fault)
        self.records.update(table.live(reply.time))

    async def _check_reachability(self) -> list[Check]:
        """Ask a few peers, public ones first, how they see this machine."""
        own = await self.transport.addresses()
        port = listening_tcp_port(own)
        reached = self.reached
        chosen = sorted(reached, key=lambda peer: not is_public_address(reached[peer]))[:MAX_QUERIED_PEERS]
        replies = await asyncio.gather(*(self._request_dial_back(peer, port) for peer in chosen))
        answers = {peer: reply for peer, reply in zip(chosen, replies, strict=True) if reply is not None}
        nat = judge_nat(own, [reply.seen for reply in answers.values() if reply.seen])
        reach = judge_dial_back({peer: port in reply.open for peer, reply in answers.items()}, port)
        return [finding for finding in (nat, reach or judge_addresses(own)) if finding]

    async def _request_dial_back(self, peer: PeerId, port: int) -> DialBackReply | None:
        request = DialBackRequest(run=self._run, ports=[port])
        try:
            stub = RunsStub(self.transport.channel(peer))
            reply: DialBackReply = await await_reply(peer, lambda: stub.DialBack(request, timeout=CALL_SECONDS))
        except (UnreachableError, PeerFault) as error:
            logger.info("%s does not dial back: %s", peer, error)
            return None
        return reply

    async def _measure_bandwidth(self) -> Check | None:
        """Download the beginning of the state that a new peer needs; `None` if no reachable trainer has it."""
        trainers = [peer for peer, record in self.records.items() if record.role == "trainer" and peer in self.reached]
        finding = None
        # Ask several times, as a new peer does: the next round may replace a state before it is downloaded.
        for peer in FETCH_ATTEMPTS * random.sample(trainers, min(MAX_QUERIED_PEERS, len(trainers))):
            try:
                chain = await request_chain(self.invitation.manifest.run_id, self.transport.channel, peer, 2**63)
                state = Blob.from_wire(chain.state)
            except (UnreachableError, PeerFault) as error:
                logger.info("%s does not name its state: %s", peer, error)
                continue
            count, seconds = await self._download_state(peer, state)
            finding = judge_bandwidth(
                count, seconds, state.size, MAX_STATE_GRACES * self.invitation.manifest.round.grace
            )
            if count or seconds >= FETCH_SECONDS:
                break
        return finding

    async def _download_state(self, peer: PeerId, state: Blob) -> tuple[int, float]:
        """Download for at most FETCH_SECONDS; returns bytes and seconds."""
        started, count = time.monotonic(), 0
        request = FetchRequest(digest=state.digest, offset=0, length=min(FETCH_BYTES, state.size))
        try:
            call = BlobsStub(self.transport.bulk_channel(peer)).Fetch(request, timeout=FETCH_SECONDS)
            async for chunk in call:
                count += len(require_reply(chunk).data)
        except (grpc.aio.AioRpcError, PeerFault) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            logger.info("the transfer from %s ended early: %s", peer, reason)
        return count, time.monotonic() - started


async def probe_network(invitation: Invitation | None, listen: Sequence[str]) -> list[Check]:
    """Start a transport and probe the run's peers, or without a run only this machine's addresses."""
    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        try:
            transport = await Transport.start(Path(folder) / "key", Path(folder), [], listen=listen)
        except MurmurError as error:
            return [Check("network", "fail", str(error), "check for a firewall or a full disk")]
        try:
            if invitation is None:
                return [judge_addresses(await transport.addresses())]
            return await RunProbe(transport, invitation).collect_findings()
        finally:
            await transport.stop()


def listening_tcp_port(addresses: Sequence[str]) -> int:
    """Return the TCP port of a transport with these addresses."""
    return next(int(parts[4]) for parts in (address.split("/") for address in addresses) if parts[3:4] == ["tcp"])


async def dial_all(connect: Connect, addresses: Sequence[str]) -> list[tuple[str, float | str]]:
    """Dial all addresses at once; returns each with the seconds that it took, or the reason why it failed."""

    async def dial(address: str) -> tuple[str, float | str]:
        started = time.monotonic()
        try:
            await connect(address, DIAL_SECONDS)
        except UnreachableError as error:
            return address, str(error)
        return address, time.monotonic() - started

    return await asyncio.gather(*(dial(address) for address in addresses))
