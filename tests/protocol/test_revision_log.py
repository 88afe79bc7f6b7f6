"""The list of revisions: one order, whoever sends it; contradictions are counted and settled; forgeries are refused."""

import itertools

import pytest

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.contributions import Adoption
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import ForgedError, LimitError, MalformedError, StaleError
from protocol.identity import Identity
from protocol.signing import sign
from protocol.steering import (
    MAX_STORED,
    REVISION_KIND,
    Revision,
    RevisionLog,
    SignedRevision,
    encode_changes,
    open_revision,
)

ORGANISER, STRANGER = Identity.create(), Identity.create()
RUN_ID = "ab" * 32


def signed(number: int, previous: bytes, time: float = 1.0, identity: Identity = ORGANISER) -> SignedRevision:
    body = Revision(number, previous, 3, encode_changes({"target.rounds": number}), time)
    return SignedMessage.of(sign(identity, REVISION_KIND, RUN_ID, body.to_wire()), body)


def listed(count: int) -> list[SignedRevision]:
    entries: list[SignedRevision] = []
    for number in range(1, count + 1):
        entries.append(signed(number, entries[-1].digest if entries else b""))
    return entries


def test_only_the_organiser_of_the_run_is_heard() -> None:
    envelope = signed(1, b"").signed
    assert open_revision(envelope, RUN_ID, ORGANISER.peer_id) == signed(1, b"")
    for organiser, run_id in ((STRANGER.peer_id, RUN_ID), ("", RUN_ID), (ORGANISER.peer_id, "cd" * 32)):
        with pytest.raises(ForgedError):
            open_revision(envelope, run_id, organiser)
    forged = wire.Signed()
    forged.CopyFrom(signed(1, b"", identity=STRANGER).signed)
    forged.peer = ORGANISER.peer_id
    with pytest.raises(ForgedError):
        open_revision(forged, RUN_ID, ORGANISER.peer_id)
    with pytest.raises(MalformedError):
        open_revision(wire.Signed(kind="peer", peer=ORGANISER.peer_id), RUN_ID, ORGANISER.peer_id)


def test_a_revision_continues_one_that_is_known() -> None:
    log, entries = RevisionLog(), listed(3)
    with pytest.raises(StaleError):
        log.add(entries[1])
    assert [log.add(entry) for entry in (*entries, entries[0])] == ["new", "new", "new", "known"]
    assert log.newest() == entries[2].digest and log.list_to(entries[1].digest) == tuple(entries[:2])
    assert log.list_after(entries[0].digest) == tuple(entries[1:]) and log.list_to(b"?" * 32) is None
    with pytest.raises(StaleError):
        log.add(signed(5, entries[2].digest))


def test_every_order_of_contradicting_revisions_leads_to_the_same_list() -> None:
    first = signed(1, b"")
    rivals = [signed(2, first.digest, time) for time in (5.0, 9.0, 7.0)]
    found = set()
    for order in itertools.permutations(rivals):
        log = RevisionLog()
        assert [log.add(entry) for entry in (first, *order)] == ["new", "new", "conflict", "conflict"]
        found.add(log.newest())
    assert found == {rivals[1].digest}, "the last one that was written"
    assert log.newest(rivals[0].digest) == rivals[0].digest, "but what is adopted stays"


def test_the_log_is_bounded() -> None:
    log = RevisionLog()
    for number in range(MAX_STORED):
        log.add(signed(1, b"", float(number)))
    with pytest.raises(LimitError):
        log.add(signed(1, b"", -1.0))


def test_an_adoption_continues_the_adopted_list_without_a_gap() -> None:
    first, second, third = listed(3)
    assert Adoption(third.digest, (second, third)).continues(first.digest)
    assert Adoption(first.digest).continues(first.digest)
    for adoption, adopted in (
        (Adoption(third.digest, (third,)), first.digest),  # a gap
        (Adoption(first.digest, (second,)), first.digest),  # names another end
        (Adoption(first.digest), second.digest),  # takes one back
        (Adoption(b""), first.digest),
    ):
        assert not adoption.continues(adopted)
