"""A buffer for messages of rounds that are not open.

Early messages come from peers that have already finished the open round; the buffer keeps them until the next round
opens. It keeps the newest message of each kind for each sender, so no peer can displace the messages of another; the
caller decides which senders are allowed. Late messages come from peers that have missed a decision: the buffer answers
each of them with the decision, and again if they still ask some time later.
"""

from collections.abc import Iterable
from typing import Any

from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.kinds import CommitCertificate
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.recent import RecentTable

MAX_KEPT_DECISIONS = 4
MAX_ANSWERED_PEERS = 4096  # for each decision; the peers answered longest ago are forgotten first
MessageKey = tuple[PeerId, str, int]  # sender, kind and part, so that each peer has a bounded number of them


def message_key(message: SignedMessage[Any]) -> MessageKey:
    """Return the key under which a newer message replaces an older one."""
    return message.sender, message.signed.kind, getattr(message.body, "part", 0)


class MessageBuffer:
    """The messages of other rounds and the last decisions of one peer.

    `repeat_seconds`: the time after which a peer that still asks gets the same decision again.
    """

    def __init__(self, repeat_seconds: float) -> None:
        self._repeat_seconds = repeat_seconds
        self._early: dict[MessageKey, SignedMessage[Any]] = {}
        self._decisions: dict[int, tuple[Signed, ...]] = {}
        self._answered_at: dict[int, RecentTable[PeerId, float]] = {}

    def buffer_early(self, message: SignedMessage[Any]) -> None:
        """Keep a message for the round after the open one."""
        self._early[message_key(message)] = message

    def open_round(self, number: int) -> list[SignedMessage[Any]]:
        """Return the early messages for a round that opens, and forget decisions of this and later rounds.

        After a change of chains, such decisions belong to the other chain.
        """
        for later in [known for known in self._decisions if known >= number]:
            del self._decisions[later], self._answered_at[later]
        early, self._early = self._early, {}
        return [message for message in early.values() if message.body.round == number]

    def clear(self) -> None:
        """Forget the early messages."""
        self._early.clear()

    def record_decision(
        self, number: int, decision: tuple[Signed, ...], informed_peers: Iterable[PeerId], now: float
    ) -> None:
        """Remember the decision of a round for late peers.

        Args:
            informed_peers: peers that have just been sent the decision.
        """
        self._decisions[number] = decision
        self._answered_at[number] = RecentTable(MAX_ANSWERED_PEERS)
        self._answered_at[number].update(dict.fromkeys(informed_peers, now))
        while len(self._decisions) > MAX_KEPT_DECISIONS:
            oldest = min(self._decisions)
            del self._decisions[oldest], self._answered_at[oldest]

    def has_decision(self, number: int) -> bool:
        """Return whether the decision of a round is remembered."""
        return number in self._decisions

    def is_late(self, message: SignedMessage[Any]) -> bool:
        """Return whether the sender does not know yet that the round of its message is decided."""
        return self.has_decision(message.body.round) and not isinstance(message.body, Commit | CommitCertificate)

    def answer_late(self, number: int, peer: PeerId, now: float) -> tuple[Signed, ...]:
        """Return the decision of a round for a late peer, or nothing if it got it a moment ago."""
        answered_at = self._answered_at[number]
        if now < answered_at.get(peer, -self._repeat_seconds) + self._repeat_seconds:
            return ()
        answered_at[peer] = now
        return self._decisions[number]
