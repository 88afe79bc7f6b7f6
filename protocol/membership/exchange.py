"""The messages of one exchange of records: what each side sends, given the summary of the other. No I/O."""

import random
from collections.abc import Mapping, Sequence

from protocol.identity import PeerId
from protocol.membership.peer_table import PeerTable
from protocol.membership.records.summary import Summary
from protocol.murmur_pb2 import GossipReply, GossipRequest, Signed

MAX_RECORDS = 256  # per message; with the largest records and MAX_PEERS known still below 1 MiB


def make_request(run: bytes, time: float, table: PeerTable, pushed: Mapping[PeerId, int], summary: Summary | None
) -> GossipRequest:  # fmt: skip
    """Return a request that sends records, and asks for those that the summary lacks; for none without a summary.

    Args:
        pushed: the peers whose records to send, with the sequences that the receiver has (0: none).
    """
    records, updates = table.updates_for(pushed)
    known, salt = (summary.to_bytes(), summary.salt) if summary else (b"", b"")
    return GossipRequest(run=run, time=time, known=known, salt=salt, records=records, updates=updates)


def make_reply(
    table: PeerTable, summary: Summary, first: Sequence[Signed], me: PeerId, rng: random.Random
) -> GossipReply:
    """Return the reply to a request: `first`, the records that it lacks, and a summary of those that we want.

    The caller adds what concerns the clock. If there are more than one message takes, a random choice goes, with our
    own record, because the rest depends on our standing.
    """
    newer, wanted = summary.compare(table.known_sequences())
    if len(newer) > MAX_RECORDS - len(first):
        own = [me] if me in newer else []
        others = rng.sample([peer for peer in newer if peer != me], MAX_RECORDS - len(first) - len(own))
        newer = {peer: newer[peer] for peer in (*own, *others)}
    records, updates = table.updates_for(newer)
    asked = wanted.first(MAX_RECORDS).to_bytes()
    return GossipReply(records=[*first, *records], updates=updates, wanted=asked)
