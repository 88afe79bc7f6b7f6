import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import signing
from protocol.errors import ForgedError, MalformedError, PeerFault
from protocol.identity import Identity, verify
from protocol.murmur_pb2 import Contribution, PeerRecord, Signed
from protocol.signing import MAX_CACHED_MESSAGE_BYTES, open_signed, peer_id_of, sign

RUN = "11" * 32
OTHER_RUN = "22" * 32
IDENTITY = Identity.create()
BODY = PeerRecord(sequence=7, expires=12.5, name="starling", addresses=["/ip4/1.2.3.4/tcp/5"])


def signed_copy(**changes: object) -> Signed:
    signed = sign(IDENTITY, "peer", RUN, BODY)
    for name, value in changes.items():
        setattr(signed, name, value)
    return signed


def test_signed_message_survives_a_round_trip() -> None:
    opened = open_signed(sign(IDENTITY, "peer", RUN, BODY), RUN, "peer", PeerRecord)
    assert opened == BODY


def test_message_of_another_run_is_forged() -> None:
    signed = sign(IDENTITY, "peer", OTHER_RUN, BODY)
    assert open_signed(signed, OTHER_RUN, "peer", PeerRecord) == BODY
    with pytest.raises(ForgedError):
        open_signed(signed, RUN, "peer", PeerRecord)


def test_kind_cannot_be_changed() -> None:
    signed = sign(IDENTITY, "peer", RUN, Contribution(round=3))
    with pytest.raises(MalformedError, match="another kind"):
        open_signed(signed, RUN, "contribution", Contribution)
    signed.kind = "contribution"  # an attacker renames it, but the signature covers the kind
    with pytest.raises(ForgedError):
        open_signed(signed, RUN, "contribution", Contribution)


def test_kind_and_run_are_separated_from_the_body() -> None:
    """With plain concatenation, bytes could move between kind and body; NUL and the run's fixed length prevent that."""
    kinds, bodies = ("ab", "a"), (b"c", b"bc")
    assert kinds[0].encode() + bodies[0] == kinds[1].encode() + bodies[1]
    first, second = sign(IDENTITY, "ab", RUN, BODY), sign(IDENTITY, "a", RUN, BODY)
    assert first.signature != second.signature


def test_another_key_cannot_sign_for_a_peer() -> None:
    with pytest.raises(ForgedError):
        open_signed(signed_copy(peer=Identity.create().peer_id), RUN, "peer", PeerRecord)


@pytest.mark.parametrize("bit", range(0, 8 * len(signed_copy().body), 7))
def test_every_changed_bit_of_the_body_is_detected(bit: int) -> None:
    signed = signed_copy()
    body = bytearray(signed.body)
    body[bit // 8] ^= 1 << bit % 8
    signed.body = bytes(body)
    with pytest.raises(PeerFault):
        open_signed(signed, RUN, "peer", PeerRecord)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_signature_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(MalformedError, match="signature"):
        open_signed(signed_copy(signature=bytes(length)), RUN, "peer", PeerRecord)


def test_oversized_body_is_refused_before_it_is_parsed() -> None:
    signed = sign(IDENTITY, "peer", RUN, PeerRecord(name="x" * 200))
    assert open_signed(signed, RUN, "peer", PeerRecord, max_bytes=300).name == "x" * 200
    with pytest.raises(MalformedError, match="at most 100 bytes"):
        open_signed(signed, RUN, "peer", PeerRecord, max_bytes=100)


def sign_body(body: bytes) -> Signed:
    """Sign any body by the peer itself, so that only the form of the body can be at fault."""
    signed_bytes = b"murmur/1\0peer\0" + bytes.fromhex(RUN) + body
    return Signed(kind="peer", peer=IDENTITY.peer_id, body=body, signature=IDENTITY.sign(signed_bytes))


def test_unknown_and_trailing_fields_are_refused() -> None:
    body = BODY.SerializeToString(deterministic=True)
    assert open_signed(sign_body(body), RUN, "peer", PeerRecord) == BODY
    unknown_field, second_sequence = b"\xfa\x07\x03abc", b"\x08\x09"
    assert PeerRecord.FromString(body + second_sequence).sequence == 9  # a plain parser uses the last value
    for trailing in (unknown_field, second_sequence, b"\0", b"\xff"):
        with pytest.raises(MalformedError):
            open_signed(sign_body(body + trailing), RUN, "peer", PeerRecord)


def test_unknown_fields_of_an_envelope_are_refused() -> None:
    signed = Signed.FromString(signed_copy().SerializeToString() + b"\xfa\x07\x03abc")
    with pytest.raises(MalformedError, match="unknown fields"):
        open_signed(signed, RUN, "peer", PeerRecord)


@given(st.binary(max_size=300))
def test_any_bytes_as_body_are_refused_as_peer_fault(noise: bytes) -> None:
    with pytest.raises(PeerFault):
        open_signed(signed_copy(body=noise), RUN, "peer", PeerRecord)


@given(st.text(max_size=100))
def test_any_text_as_peer_id_is_refused_as_peer_fault(noise: str) -> None:
    with pytest.raises(PeerFault):
        open_signed(signed_copy(peer=noise), RUN, "peer", PeerRecord)


def test_peer_id_is_read_from_an_address() -> None:
    peer = IDENTITY.peer_id
    assert peer_id_of(f"/ip4/1.2.3.4/tcp/5/p2p/{peer}") == peer
    assert peer_id_of(f"/ip4/1.2.3.4/tcp/5/p2p/{Identity.create().peer_id}/p2p-circuit/p2p/{peer}") == peer
    for address in ("", "/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/5/p2p/", "/p2p/nobody", f"/p2p/{peer}/tcp/1"):
        with pytest.raises(MalformedError):
            peer_id_of(address)


def test_valid_signature_is_verified_once_and_forged_one_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contribution arrives again in a roster and a commit. Control: messages too long to cache are reverified."""
    checked: list[int] = []

    def count_checks(peer: str, message: bytes, signature: bytes) -> None:
        checked.append(len(message))
        verify(peer, message, signature)

    monkeypatch.setattr(signing, "verify", count_checks)
    short, long = (
        sign(IDENTITY, "peer", RUN, PeerRecord(sequence=9, name="x" * size)) for size in (1, MAX_CACHED_MESSAGE_BYTES)
    )
    for signed, times in ((short, 1), (long, 2)):
        checked.clear()
        for _ in range(2):
            open_signed(signed, RUN, "peer", PeerRecord)
        assert len(checked) == times
    forged = signed_copy(signature=short.signature)
    for _ in range(2):
        with pytest.raises(ForgedError):
            open_signed(forged, RUN, "peer", PeerRecord)
    with pytest.raises(ForgedError):
        open_signed(short, OTHER_RUN, "peer", PeerRecord)
