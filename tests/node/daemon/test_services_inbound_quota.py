"""How much peers may bring: all that a round of a thousand needs, and no more than a part of our time."""

from collections.abc import Sequence

import pytest

from node.daemon.inbox import ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE, InboundQuota
from node.daemon.peers.peer_rpc import MAX_BATCH_BYTES
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import Commit, Contribution, Roster
from protocol.consensus.messages.kinds import CommitCertificate, Inventory, ReducerAssignment
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import LimitError
from tests.node.small_run import PEERS, contribution_of, stated

LEADER_TIMEOUT, EXCHANGE_TIMEOUT = 5.0, 60.0
PEOPLE = 1000
HEAD = ChainHead(10**6, bytes(range(32)), 0)


def sizes_of_a_round(parts: int) -> dict[str, int]:
    """Bytes of what a leader says to a member, in a round of a thousand; their signatures are one and the same."""
    blobs = [Blob(bytes([1, part % 256]) * 16, 200_000_000) for part in range(parts)]
    one: SignedMessage[Contribution] = stated(PEERS[1], contribution_of(HEAD, blobs))
    names = tuple(PEERS[1].peer_id for _ in range(PEOPLE))
    said = stated(PEERS[1], Inventory(HEAD.round, 0, HEAD.digest, ()))
    bodies = {
        "contribution": one.body,
        "roster": Roster(HEAD.round, 0, HEAD.digest, (one,) * PEOPLE),
        "commit": Commit(HEAD.round, 0, HEAD.digest, (one,) * PEOPLE, tuple(blobs)),
        "holding": Inventory(HEAD.round, 0, HEAD.digest, (HEAD.digest,) * (PEOPLE + parts)),
        "inclusion": ReducerAssignment(HEAD.round, 0, HEAD.digest, 1, names, names[:parts]),
        "decision": CommitCertificate(HEAD.round, 0, HEAD.digest, (said,) * PEOPLE),
    }
    return {kind: stated(PEERS[0], body).signed.ByteSize() for kind, body in bodies.items()}


@pytest.mark.parametrize("parts", [1, 12])
def test_the_leader_of_a_thousand_never_meets_the_limit(parts: int) -> None:
    """In the longest round there is: everything is said again at each repetition, and its end is told at once with
    those of the rounds before."""
    deliveries, sizes = InboundQuota(parts, LEADER_TIMEOUT), sizes_of_a_round(parts)
    assert sizes["roster"] <= MAX_BATCH_BYTES
    now = 0.0
    for batch in ("roster", "contribution", "inclusion", "holding"):
        deliveries.charge("leader", [sizes[batch]], True, now)
    while now < EXCHANGE_TIMEOUT:
        now += LEADER_TIMEOUT / 3
        for batch in ("commit", "inclusion", "holding"):
            deliveries.charge("leader", [sizes[batch]], True, now)
    deliveries.charge("leader", [sizes["decision"]], True, now)
    late = InboundQuota(parts, LEADER_TIMEOUT)
    for _ in range(4):
        late.charge("leader", [sizes["commit"]], True, 0.0)
        late.charge("leader", [sizes["decision"]], True, 0.0)


def taken(deliveries: InboundQuota, peers: Sequence[str], size: int, is_member: bool, seconds: float) -> int:
    """Bytes, where each of them calls ten times a second, a call after the other."""
    total = 0
    for tick in range(int(seconds * 10)):
        for peer in peers:
            try:
                deliveries.charge(peer, [size], is_member, tick / 10)
            except LimitError:
                continue
            total += size
    return total


@pytest.mark.parametrize(("parts", "share"), [(1, 0.2), (12, 0.5)])
def test_a_member_that_brings_rosters_without_end_takes_a_part_of_our_time(parts: int, share: float) -> None:
    """A roster of a thousand of one part each takes a fifth of a second, whatever the run's parts are."""
    deliveries, size = InboundQuota(parts, LEADER_TIMEOUT), sizes_of_a_round(1)["roster"]
    seconds_each = 0.2
    spent = taken(deliveries, ["greedy"], size, True, 600) / size * seconds_each / 600
    assert spent < share
    assert 10 * seconds_each > 1, "the control: ten calls a second are more than there is time for"
    deliveries.charge("modest", [size], True, 600.0)


def test_strangers_say_little_and_all_of_them_together_do() -> None:
    """Names cost nothing."""
    deliveries, seconds, size = InboundQuota(1, LEADER_TIMEOUT), 60, 4000
    assert taken(deliveries, [f"stranger {number}" for number in range(2000)], size, False, seconds) <= (
        ALL_UNKNOWN_BURST_BYTES + seconds * ALL_UNKNOWN_RATE
    )
    one = InboundQuota(1, LEADER_TIMEOUT)
    assert taken(one, ["stranger"], size, False, seconds) < 600_000
    roster = sizes_of_a_round(1)["roster"]
    with pytest.raises(LimitError, match="not known as a member"):
        InboundQuota(1, LEADER_TIMEOUT).charge("stranger", [roster], False, 0.0)


@pytest.mark.parametrize("parts", [1, 12, 4000])
def test_what_a_newcomer_says_first_is_taken(parts: int) -> None:
    contribution = Contribution(
        HEAD.round, HEAD.digest, "diloco", bytes(32), 1 << 40, 1 << 20, 3.0, (Blob(bytes(32), 1 << 28),) * parts
    )
    size = stated(PEERS[0], contribution).signed.ByteSize()
    InboundQuota(parts, LEADER_TIMEOUT).charge("newcomer", [size, 400, 400], False, 0.0)


def test_calls_and_statements_count_however_short() -> None:
    deliveries = InboundQuota(1, LEADER_TIMEOUT)
    assert taken(deliveries, ["stranger"], 1, False, 1000) < 16 + 2 + 8 * 1000
    with pytest.raises(LimitError):
        InboundQuota(1, LEADER_TIMEOUT).charge("stranger", [1] * 100, False, 0.0)
