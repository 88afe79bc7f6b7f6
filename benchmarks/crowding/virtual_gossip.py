"""The gossip of virtual peers over one round: who holds which version of each record, with real encoded sizes.

At each heartbeat every peer exchanges with three others, as the directory does: a summary, the records that either side
lacks, and a second call for those that the other side asks for. Each peer publishes its head once in a round, and
renews its record when a quarter of its validity is over. The sizes are those of encoded messages with real signatures.
"""

import random
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.identity import Identity
from protocol.membership.directory import GOSSIP_FANOUT
from protocol.membership.gossip import MAX_RECORDS
from protocol.membership.peer_table import KEPT_VERSIONS, KIND, RENEWAL_SHARE
from protocol.membership.record_fields import make_update
from protocol.membership.summary import Summary
from protocol.murmur_pb2 import GossipReply, GossipRequest, PeerRecord, Signed
from protocol.signing import sign

HEARTBEAT, EXPIRY = 2.0, 15.0  # the manifest's defaults
WARM_UP_HEARTBEATS = 12
SUMMARY_BYTES = 8  # for each peer
RUN_ID = "ab" * 32
Versions = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Sizes:
    """The encoded bytes of a request and a reply without records, and of one record or update in a message."""

    request: int
    reply: int
    record: int
    update: int


def measure(peers: int, rounds: int, seconds: float, seed: int = 0) -> tuple[float, int]:
    """Return the bytes that a peer sends in a round, and by how many versions a record lags at most."""
    rng, draw, sizes = random.Random(seed), np.random.default_rng(seed), _sizes()
    versions, newest = np.zeros((peers, peers), np.int32), np.ones(peers, np.int32)
    phase = [rng.random() for _ in range(peers)]
    renewed = [-RENEWAL_SHARE * EXPIRY * rng.random() for _ in range(peers)]
    total, slowest, heartbeats = 0, 0, max(1, round(rounds * seconds / HEARTBEAT))
    for beat in range(-WARM_UP_HEARTBEATS, heartbeats):
        now = beat * HEARTBEAT
        for peer in range(peers):
            is_new_head = int((now - phase[peer]) // seconds) != int((now - HEARTBEAT - phase[peer]) // seconds)
            if is_new_head or now - renewed[peer] >= RENEWAL_SHARE * EXPIRY:
                newest[peer] += 1
                renewed[peer] = now
            versions[peer, peer] = newest[peer]
        pairs = ((peer, other) for peer in range(peers) for other in _partners(peers, peer, rng))
        sent = sum(_exchange(versions, peer, other, sizes, draw) for peer, other in pairs)
        total += sent if beat >= 0 else 0
        slowest = max(slowest, int((newest - versions.min(axis=0)).max())) if beat >= 0 else 0
    return total / peers / rounds, slowest


def _partners(peers: int, peer: int, rng: random.Random) -> list[int]:
    chosen = rng.sample(range(peers - 1), min(GOSSIP_FANOUT, peers - 1))
    return [other + (other >= peer) for other in chosen]


def _exchange(versions: Versions, peer: int, other: int, sizes: Sizes, draw: np.random.Generator) -> int:
    """Let two peers exchange what they lack; return the bytes of all calls."""
    ours, theirs = versions[peer], versions[other]
    total = sizes.request + sizes.reply + SUMMARY_BYTES * len(ours) + sizes.update  # our own record goes first
    theirs[peer] = ours[peer]
    pulled = draw.permutation(np.flatnonzero(theirs > ours))[:MAX_RECORDS]
    wanted = draw.permutation(np.flatnonzero(ours > theirs))[:MAX_RECORDS]
    total += _record_bytes(theirs[pulled] - ours[pulled], sizes) + SUMMARY_BYTES * len(wanted)
    if len(wanted):
        total += sizes.request + sizes.reply + _record_bytes(ours[wanted] - theirs[wanted], sizes)
    ours[pulled], theirs[wanted] = theirs[pulled], ours[wanted]
    return total


def _record_bytes(behind: Versions, sizes: Sizes) -> int:
    updates = int((behind <= KEPT_VERSIONS).sum())
    return updates * sizes.update + (len(behind) - updates) * sizes.record


def _sizes() -> Sizes:
    identity = Identity.create()
    base, _ = _record(identity, 1)
    signed, record = _record(identity, 2)
    salt = Summary.of({}, bytes(8)).salt
    request = GossipRequest(run=bytes.fromhex(RUN_ID), time=time.time(), salt=salt, known=bytes(800)).ByteSize() - 800
    update = GossipReply(updates=[make_update(signed, record, base)]).ByteSize()
    return Sizes(request, GossipReply(time=time.time()).ByteSize(), GossipReply(records=[signed]).ByteSize(), update)


def _record(identity: Identity, number: int) -> tuple[Signed, PeerRecord]:
    """Return a record as trainers publish it; with another number all figures and the head differ."""
    record = PeerRecord(
        sequence=int(time.time() * 1000) + number, expires=time.time() + number, role="trainer", version="0.1.0",
        addresses=[f"/ip4/198.51.100.7/tcp/{port}/p2p/{identity.peer_id}" for port in (4001, 4002)],
        device="NVIDIA H100 80GB HBM3", name="somebody's machine", round=100 + number, step=50_000 + number,
        digest=bytes([number]) * 32, state_digest=bytes([number]) * 32, chain_tokens=10**10 + number,
        tokens=10**8 + number, loss=2.5 + number / 7, tokens_per_second=1000.5 + number, bytes_sent=10**9 + number,
        bytes_received=10**9 + number, compute_seconds=1234.5 + number, exchange_seconds=99.5 + number,
        wait_seconds=17.25 + number, learning_rate=3e-4 / number, gradient_norm=0.7 + number, direct_port=4001,
        device_use=0.5 + number / 10, device_memory=10**10 + number, device_memory_total=8 * 10**10, start=2**60,
    )  # fmt: skip
    return sign(identity, KIND, RUN_ID, record), record
