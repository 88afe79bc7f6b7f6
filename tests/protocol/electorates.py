"""Commits that an electorate counts, with as little in them as it reads."""

from collections.abc import Iterable

from protocol import murmur_pb2 as wire
from protocol.admission import Ticket
from protocol.consensus.messages.contributions import NOTHING_ADOPTED, Adoption, Commit, Contribution
from protocol.consensus.messages.signed import SignedMessage
from protocol.electorate import REVOKED_KEY, Electorate
from protocol.identity import PeerId
from protocol.steering import Revision, encode_changes


def included(peer: PeerId, number: int, has_ticket: bool = True) -> SignedMessage[Contribution]:
    ticket = SignedMessage(wire.Signed(), Ticket(peer, 1.0), "organiser", b"") if has_ticket else None
    body = Contribution(number, bytes(32), "codec", bytes(32), 1, 1, 0.0, (), ticket=ticket)
    return SignedMessage(wire.Signed(), body, peer, peer.encode())


def commit(number: int, peers: Iterable[PeerId], adoption: Adoption = NOTHING_ADOPTED) -> Commit:
    contributions = tuple(included(peer, number) for peer in sorted(peers))
    return Commit(number, 0, bytes(32), contributions, (), (), adoption)


def revoking(*keys: PeerId) -> Adoption:
    body = Revision(1, b"", 0, encode_changes({REVOKED_KEY: list(keys)}), 0.0)
    return Adoption(bytes(32), (SignedMessage(wire.Signed(), body, "organiser", bytes(32)),))


def after_rounds(electorate: Electorate, count: int, peers: Iterable[PeerId]) -> Electorate:
    chosen = tuple(peers)
    for _ in range(count):
        electorate = electorate.after(commit(electorate.round, chosen))
    return electorate
