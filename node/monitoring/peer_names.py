"""The public names of the peers of a run, for log lines that name peers by their ids."""

import re
from collections.abc import Sequence

from protocol.identity import PeerId
from protocol.membership.peer_table import MembershipEvent, PeerLeft

MAX_NAMES = 4096
MAX_SHOWN_CHARACTERS = 24
DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")
PEER_ID = re.compile(r"(?P<route>/p2p/)?\b(?P<peer>12D3KooW[1-9A-HJ-NP-Za-km-z]{44})\b")


def shorten_peer_id(peer: PeerId) -> str:
    """Return the beginning, which shows that it is a peer id, and the end, which differs between peers."""
    return f"{peer[:4]}..{peer[-6:]}"


class PeerNames:
    """Learns names from the peer directory. A name is what its peer says; only the id is certain."""

    def __init__(self) -> None:
        self._names: dict[PeerId, str] = {}

    def learn(self, peer: PeerId, name: str) -> None:
        """Remember a name; the oldest ones are forgotten."""
        self._names.pop(peer, None)
        if name:
            self._names[peer] = name[:MAX_SHOWN_CHARACTERS]
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        for event in events:
            if not isinstance(event, PeerLeft) and self._names.get(event.peer, "") != event.record.name:
                self.learn(event.peer, event.record.name)

    def label(self, peer: PeerId) -> str:
        """Return `mary (12D3..AbCdEf)`, or `12D3..AbCdEf` for a peer without a name."""
        name, short = self._names.get(peer), shorten_peer_id(peer)
        return f"{name} ({short})" if name else short

    def replace_ids(self, text: str) -> str:
        """Replace each peer id in a text by its label, and drop those at the end of addresses; shorten digests."""
        return DIGEST.sub(r"\1..", PEER_ID.sub(self._label_of_match, text))

    def _label_of_match(self, found: re.Match[str]) -> str:
        return "" if found["route"] else self.label(found["peer"])
