"""Signed statements: what one peer says, so that anyone who gets it from anyone knows who said it.

The signature covers "murmur/1" NUL kind NUL run-id body: a statement of one kind or run is nothing in another.
Only the one canonical encoding of a body is accepted, so a statement has a single digest, and nobody can hang
fields on it that we do not know and would pass on.
"""

from functools import lru_cache
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protocol import murmur_pb2
from protocol.errors import MalformedError
from protocol.identity import Identity, PeerId, public_key, verify
from protocol.manifest import RunId

DOMAIN = b"murmur/1"
MAX_BODY_BYTES = 512 * 1024
SIGNATURE_BYTES = 64
MAX_CACHED_MESSAGE_BYTES, MAX_CACHED_SIGNATURES = 4096, 512  # a statement of which it is remembered that its signature is genuine; how many of them
MAX_ROUND = 2**24  # a round each half minute for sixteen years
MAX_CHAIN_TOKENS = 2**60

MessageT = TypeVar("MessageT", bound=Message)


def sign(identity: Identity, kind: str, run_id: RunId, body: Message) -> murmur_pb2.Signed:
    encoded = body.SerializeToString(deterministic=True)
    signature = identity.sign(_signed_bytes(kind, run_id, encoded))
    return murmur_pb2.Signed(kind=kind, peer=identity.peer_id, body=encoded, signature=signature)


def open_signed(
    signed: murmur_pb2.Signed, run_id: RunId, kind: str, message_type: type[MessageT], max_bytes: int = MAX_BODY_BYTES
) -> MessageT:
    """The body of a statement that its peer signed for this run, of at most `max_bytes`.

    Raises MalformedError for anything that is not exactly such a statement, ForgedError for a wrong signature.
    """
    body = read_unverified(signed, kind, message_type, max_bytes)
    verify_signed(signed, run_id)
    return body


def read_unverified(signed: murmur_pb2.Signed, kind: str, message_type: type[MessageT], max_bytes: int = MAX_BODY_BYTES) -> MessageT:
    """The body without its signature checked: only to decide cheaply whether the check is worth its time."""
    _check_envelope(signed, kind, max_bytes)
    body = message_type()
    try:
        body.ParseFromString(signed.body)
    except DecodeError as error:
        raise MalformedError(f"a {kind} statement of {signed.peer} does not parse") from error
    body.DiscardUnknownFields()
    if body.SerializeToString(deterministic=True) != signed.body:
        raise MalformedError(f"a {kind} statement of {signed.peer} is not in canonical form")
    return body


def verify_signed(signed: murmur_pb2.Signed, run_id: RunId) -> None:
    """Raises ForgedError unless the peer that it names signed it, for this run and its kind."""
    covered = _signed_bytes(signed.kind, run_id, signed.body)
    (_verify_cached if len(covered) <= MAX_CACHED_MESSAGE_BYTES else verify)(signed.peer, covered, signed.signature)


@lru_cache(maxsize=MAX_CACHED_SIGNATURES)
def _verify_cached(peer: PeerId, covered: bytes, signature: bytes) -> None:
    """A contribution comes from its maker, in a roster and in a commit; what was genuine once is so again."""
    verify(peer, covered, signature)


def _check_envelope(signed: murmur_pb2.Signed, kind: str, max_bytes: int) -> None:
    public_key(signed.peer)  # first of all, because the messages below quote the id
    if signed.kind != kind:
        raise MalformedError(f"{signed.peer} sent a statement of another kind where {kind} belongs")
    if len(signed.body) > max_bytes:
        raise MalformedError(f"a {kind} statement of {signed.peer} has {len(signed.body)} of at most {max_bytes} bytes")
    if len(signed.signature) != SIGNATURE_BYTES:
        raise MalformedError(f"a {kind} statement of {signed.peer} has a signature of {len(signed.signature)} bytes")
    if len(UnknownFieldSet(signed)):
        raise MalformedError(f"a {kind} statement of {signed.peer} carries unknown fields")


def _signed_bytes(kind: str, run_id: RunId, body: bytes) -> bytes:
    return b"\0".join((DOMAIN, kind.encode(), bytes.fromhex(run_id) + body))


def peer_id_of(address: str) -> PeerId:
    """The peer id at the end of a multiaddress. Raises MalformedError where there is none."""
    _, found, peer = address.rpartition("/p2p/")
    if not found:
        raise MalformedError(f"{address[:200]!r} does not end in /p2p/<peer id>")
    public_key(peer)
    return peer
