"""Briefs: messages come out byte for byte, are a fraction as long, and whatever is said in them cannot do harm."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.messages import briefs as seen_module
from protocol.consensus.messages.briefs import BriefCache, SeenMessages, make_brief, reference_to, restore
from protocol.consensus.messages.contributions import Adoption, Commit, Roster
from protocol.consensus.messages.kinds import Inventory, ReducedPart, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import LimitError, MalformedError
from tests.simulation.virtual.network import NAMES, Scenario, make_contribution, make_signer

BASE = bytes(32)
SCENARIO = Scenario(12, "butterfly", 12, 1, 0, 0, 0, 0, 0)
PARTS = [Blob.of(bytes([number])) for number in range(12)]


def signed(peer: str, body: Any) -> SignedMessage[Any]:
    return SignedMessage.of(make_signer(peer)(kind_of(body), body.to_wire()), body)


CONTRIBUTIONS = tuple(signed(peer, make_contribution(peer, 0, BASE, SCENARIO)) for peer in sorted(NAMES[:12]))
LEADER = NAMES[0]
ROSTER = signed(LEADER, Roster(0, 0, BASE, CONTRIBUTIONS))
COMMIT = signed(LEADER, Commit(0, 0, BASE, CONTRIBUTIONS[1:], tuple(PARTS), (CONTRIBUTIONS[0].sender,), Adoption(b"")))
INVENTORY = signed(
    NAMES[3],
    Inventory(0, 0, ROSTER.digest, tuple(sorted({
        *(entry.body.parts[4].digest for entry in CONTRIBUTIONS), *(part.digest for part in PARTS), bytes(32)
    }))),
)  # fmt: skip
DECISION = make_signer(LEADER)(
    "decision",
    wire.Decision(proposal=COMMIT.digest, peers=sorted(NAMES[2:14]), signatures=[bytes([n]) * 64 for n in range(12)]),
)
MESSAGES = [ROSTER.signed, COMMIT.signed, INVENTORY.signed, DECISION]


def everything_seen() -> SeenMessages:
    seen = SeenMessages()
    for entry in CONTRIBUTIONS:
        seen.record(entry.signed)
    for message in (ROSTER.signed, COMMIT.signed):
        seen.record(message)
    for number, part in enumerate(PARTS):
        seen.record(signed(NAMES[1], ReducedPart(0, 0, ROSTER.digest, 0, number, part, bytes(32))).signed)
    return seen


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_receiver_that_has_seen_the_parts_restores_the_message(message: wire.Signed) -> None:
    brief = make_brief(message, everything_seen())
    assert brief is not None
    copied = wire.Brief.FromString(brief.SerializeToString())
    assert restore(copied, everything_seen()) == message
    assert brief.ByteSize() < message.ByteSize() * (0.7 if message.kind in ("decision", "commit") else 0.4)


@pytest.mark.parametrize("message", MESSAGES[:2], ids=lambda message: message.kind)
def test_receiver_that_lacks_one_part_asks_for_the_whole(message: wire.Signed) -> None:
    brief, lacking = make_brief(message, everything_seen()), SeenMessages()
    for entry in CONTRIBUTIONS[:-1]:
        lacking.record(entry.signed)
    assert brief is not None and restore(brief, lacking) is None
    lacking.record(CONTRIBUTIONS[-1].signed)
    assert restore(brief, lacking) == message


@pytest.mark.parametrize("message", MESSAGES[2:], ids=lambda message: message.kind)
def test_bits_over_an_unknown_list_ask_for_the_whole(message: wire.Signed) -> None:
    brief = make_brief(message, everything_seen())
    assert brief is not None and restore(brief, SeenMessages()) is None


def test_sender_that_has_not_seen_a_list_names_all() -> None:
    for message in MESSAGES[2:]:
        brief = make_brief(message, SeenMessages())
        assert brief is None or restore(brief, SeenMessages()) == message


def test_other_kinds_have_no_brief() -> None:
    assert make_brief(CONTRIBUTIONS[0].signed, everything_seen()) is None


def test_second_contribution_of_a_peer_is_not_taken_for_the_first() -> None:
    """A reference covers the signature too: the body that a receiver puts together is that which was signed."""
    first = CONTRIBUTIONS[0]
    other = signed(first.sender, replace(first.body, steps=11))
    seen = SeenMessages()
    for entry in (other, *CONTRIBUTIONS[1:]):
        seen.record(entry.signed)
    brief = make_brief(ROSTER.signed, everything_seen())
    assert brief is not None and restore(brief, seen) is None


def test_message_is_abridged_once_for_all_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    brief_cache, record, calls = BriefCache(SeenMessages()), SeenMessages.record, list[wire.Signed]()

    def count(self: SeenMessages, message: wire.Signed) -> None:
        calls.append(message)
        record(self, message)

    monkeypatch.setattr(SeenMessages, "record", count)
    briefs = [brief_cache.brief_of(ROSTER.signed) for _ in range(5)]
    assert briefs[0] is not None and all(brief is briefs[0] for brief in briefs) and len(calls) == 1


@pytest.mark.parametrize(("brief", "fault"), [
    (wire.Brief(kind="contribution"), MalformedError),
    (wire.Brief(kind="roster", body=b"\xff"), MalformedError),
    (wire.Brief(kind="roster", references=bytes(9)), MalformedError),
    (wire.Brief(kind="roster", references=bytes(8 * 1025)), MalformedError),
    (wire.Brief(kind="holding", body=wire.Holding(roster=ROSTER.digest).SerializeToString(), bits=bytes(19)),
     MalformedError),
])  # fmt: skip
def test_malformed_briefs_are_refused(brief: wire.Brief, fault: type[Exception]) -> None:
    with pytest.raises(fault):
        restore(brief, everything_seen())


def test_brief_cannot_grow_beyond_the_largest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.consensus.messages.briefs.MAX_MESSAGE_BYTES", 10_000)
    brief = wire.Brief(kind="roster", references=reference_to(CONTRIBUTIONS[0].signed) * 100)
    with pytest.raises(LimitError):
        restore(brief, everything_seen())


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(0, 10**6), st.integers(0, 255))
def test_altered_briefs_never_crash(message: wire.Signed, place: int, value: int) -> None:
    brief = make_brief(message, everything_seen())
    assert brief is not None
    content = bytearray(brief.SerializeToString())
    content[place % len(content)] = value
    try:
        restored = restore(wire.Brief.FromString(bytes(content)), everything_seen())
    except (MalformedError, LimitError, ValueError, UnicodeDecodeError):
        return
    except Exception as error:  # protobuf's DecodeError is of the altered frame, before our code
        assert type(error).__name__ == "DecodeError"
        return
    assert restored is None or isinstance(restored, wire.Signed)  # the signature is verified afterwards


def test_flood_of_contributions_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_module, "MAX_SEEN_BYTES", 3 * CONTRIBUTIONS[0].signed.ByteSize())
    seen = SeenMessages()
    for entry in CONTRIBUTIONS:
        seen.record(entry.signed)
    kept = [entry for entry in CONTRIBUTIONS if seen.contribution(reference_to(entry.signed))]
    assert kept == list(CONTRIBUTIONS[-3:])
