"""PURE: how much a peer may bring to our rounds; the caller passes the time (seconds, monotonic).

All that is brought is checked at once, signature by signature, and everything else waits meanwhile: a roster of a
thousand takes a fifth of a second. So what one peer brings is limited, in bytes, as its signatures fill them.

A member may bring as much as the leader of the largest round there can be, which says its roster or its proposal again
at every repetition, and far more at once. Of whom the directory does not know yet little is taken, and little of all of
them together, as anybody has as many names as he likes: enough for what a newcomer says before its record is about.
What is refused costs no more than a repetition.
"""

from node.daemon.post import MAX_BATCH_BYTES
from protocol.errors import LimitError
from protocol.identity import PeerId
from protocol.membership.allowance import TokenBuckets, SharedTokenBuckets
from protocol.rounds.state import RETRANSMITS_PER_TIMEOUT
from protocol.rounds.statements import MAX_CONTRIBUTIONS

CONTRIBUTION_BYTES, PART_BYTES = 320, 48  # of a signed one, rounded up
MIN_CALL_BYTES = 1024  # that any call counts at least
MIN_MESSAGE_BYTES = 256  # and any statement
MEMBER_BURST_MESSAGES = 8  # of the largest statements: a round's, and the decisions of those before
MIN_MEMBER_RATE = 64 * 1024
ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE = 1024 * 1024, 128 * 1024  # all of them together
UNKNOWN_PEER_RATE = 8 * 1024


class InboundQuota:
    """`parts`: the most that a contribution has."""

    def __init__(self, max_parts: int, leader_timeout: float) -> None:
        contribution = CONTRIBUTION_BYTES + max_parts * PART_BYTES
        largest = min(MAX_BATCH_BYTES, MAX_CONTRIBUTIONS * contribution)
        rate = max(MIN_MEMBER_RATE, largest * RETRANSMITS_PER_TIMEOUT / leader_timeout)
        self._members = TokenBuckets(MEMBER_BURST_MESSAGES * largest, rate)
        each = TokenBuckets(2 * contribution + 16 * MIN_CALL_BYTES, UNKNOWN_PEER_RATE)
        self._unknown_peers = SharedTokenBuckets(each, TokenBuckets(ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE))

    def charge(self, peer: PeerId, sizes: list[int], is_member: bool, now: float) -> None:
        """`sizes`: of the statements of one call. LimitError: it is too much for now."""
        size = max(MIN_CALL_BYTES, sum(max(MIN_MESSAGE_BYTES, size) for size in sizes))
        if is_member:
            if not self._members.try_take(peer, now, size):
                raise LimitError(f"{peer} delivers more than a leader has to say; later again")
        elif lack := self._unknown_peers.charge(peer, now, size):
            much = f"delivers {size} bytes" if lack == "caller" else "delivers while too many such do"
            raise LimitError(f"{peer} {much} and is not known as a member; later again")
