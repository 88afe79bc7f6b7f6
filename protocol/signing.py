"""Signed statements: what one peer says, so that anyone who gets it from anyone knows who said it.

The signature covers "murmur/1" NUL kind NUL run-id body: a statement of one kind or run is nothing in another.
Only the one canonical encoding of a body is accepted, so a statement has a single digest, and nobody can hang
fields on it that we do not know and would pass on.

A manifest as its organiser publishes it: the TOML text, and below it two comments that tell who signed it.

    [run]
    name = "demo"
    ...
    # organiser 12D3KooW...
    # signature BASE64

The signature covers "murmur/1" NUL "manifest" NUL and every byte above the two comments, bootstrap addresses included.
To a parser of TOML the comments are nothing, so the file is a manifest like any other.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protocol import murmur_pb2
from protocol.errors import MalformedError, OrganiserError, PeerFault
from protocol.identity import Identity, PeerId, public_key, verify
from protocol.manifest import MAX_MANIFEST_BYTES, Manifest, RunId, parse_manifest

DOMAIN = b"murmur/1"
MAX_BODY_BYTES = 512 * 1024
SIGNATURE_BYTES = 64
MAX_CACHED_MESSAGE_BYTES, MAX_CACHED_SIGNATURES = (
    4096,
    512,
)  # a statement of which it is remembered that its signature is genuine; how many of them
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


def read_unverified(
    signed: murmur_pb2.Signed, kind: str, message_type: type[MessageT], max_bytes: int = MAX_BODY_BYTES
) -> MessageT:
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


SIGNATURE_LINES = re.compile(
    rb"# organiser (?P<organiser>[1-9A-HJ-NP-Za-km-z]{52})\n"
    rb"# signature (?P<signature>[A-Za-z0-9+/]{86}==)\n\Z"
)
MAX_SIGNATURE_LINES_BYTES = 200
MAX_SIGNED_MANIFEST_BYTES = MAX_MANIFEST_BYTES + MAX_SIGNATURE_LINES_BYTES


@dataclass(frozen=True)
class SignedManifest:
    """`organiser` is None for a manifest that nobody signed."""

    manifest: Manifest
    organiser: PeerId | None


def sign_manifest(manifest: Manifest, identity: Identity) -> bytes:
    """The signed text."""
    text = manifest.to_toml().encode()
    signature = base64.b64encode(identity.sign(_signed_manifest_bytes(text))).decode()
    return text + f"# organiser {identity.peer_id}\n# signature {signature}\n".encode()


def open_signed_manifest(text: bytes, origin: str) -> SignedManifest:
    """Raises ManifestError for what is no manifest, OrganiserError for one with a signature that is wrong."""
    found = SIGNATURE_LINES.search(text[-MAX_SIGNATURE_LINES_BYTES:])
    if found is None:
        return SignedManifest(parse_manifest(text, origin), None)
    organiser = found["organiser"].decode()
    body = text[: len(text) - len(found[0])]
    try:
        verify(organiser, _signed_manifest_bytes(body), base64.b64decode(found["signature"], validate=True))
    except (PeerFault, binascii.Error) as error:
        raise OrganiserError(
            f"{origin}: the text is not what {organiser} signed; get it anew, or remove the last two lines of a file "
            "that you changed yourself"
        ) from error
    return SignedManifest(parse_manifest(body, origin), organiser)


def fingerprint(organiser: PeerId) -> str:
    """Half of the SHA-256 of the key, in groups of four that two people can compare: `9f3c 21aa ...`."""
    digest = hashlib.sha256(public_key(organiser).public_bytes_raw()).hexdigest()[:32]
    return " ".join(digest[start : start + 4] for start in range(0, len(digest), 4))


def _signed_manifest_bytes(text: bytes) -> bytes:
    return b"\0".join((DOMAIN, b"manifest", text))
