"""Signed messages of peers, and signed manifests of organisers.

Anyone who receives a signed message from anyone can verify which peer wrote it. The signature covers
"murmur/1" NUL kind NUL run-id body, so a message of one kind or run is invalid as another. Only the canonical encoding
of a body is accepted, so a message has a single digest, and nobody can append unknown fields that we would pass on.

A host publishes a manifest as TOML text followed by two comments that name the signer:

    [run]
    name = "demo"
    ...
    # organiser 12D3KooW...
    # signature BASE64

A run that its organiser can steer (`run.organiser_key`) has a third one above them, with which the organiser vouches
for the key of the host (`Voucher`). Then the signature is the host's, and people compare and pin the organiser's key:

    # voucher 12D3KooW(host) BASE64
    # organiser 12D3KooW...
    # signature BASE64

A host may add `# trust POINT` above them: the newest round that it holds (`TrustPoint`). The
signature covers "murmur/1" NUL "manifest" NUL and every byte above the two comments, bootstrap addresses and trust
included. TOML parsers ignore comments, so the file is a manifest like any other. A line that begins like one of the two
comments anywhere else, or a comment in another form, is an error: a signature that an editor or a mailer has damaged
must not count as absent.

A trust point is a round of a run for which a person vouches, in a text short enough to read out:

    1234-9f3c21aa5b0e77d41c09a3e2f6d4b810

The number is that of the rounds before it. The rest is the beginning of a SHA-256 over the digests of the chain, of the
state and of the electorate there, so a chain that passes through the point has the same history, model and voters.
`murmur status` shows the newest one of a node.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Self, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protocol import murmur_pb2
from protocol.errors import MalformedError, OrganiserError, PeerFault
from protocol.identity import Identity, PeerId, public_key, verify
from protocol.manifest.reading import MAX_MANIFEST_BYTES, ManifestText, decode_text, parse_manifest, read_manifest_bytes
from protocol.manifest.run import Manifest, RunId
from protocol.manifest.sections import MAX_ROUNDS

Digest = bytes  # 32 bytes, SHA-256
MARK_BYTES = 16
TRUST_PATTERN = rf"(\d{{1,8}})-([0-9a-f]{{{2 * MARK_BYTES}}})"
DOMAIN = b"murmur/1"
MAX_BODY_BYTES = 512 * 1024
SIGNATURE_BYTES = 64
MAX_CACHED_MESSAGE_BYTES = 4096  # signatures of longer messages are not cached
MAX_CACHED_SIGNATURES = 512
MAX_ROUND = 2**24  # a round every half minute for sixteen years
MAX_CHAIN_TOKENS = 2**60
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True)
class TrustPoint:
    """A round, and the mark that its chain, state and voters must have."""

    round: int
    mark: bytes

    @classmethod
    def of(cls, round_number: int, chain: Digest, state: Digest, voters: Digest) -> Self:
        """Return the trust point at a head.

        Args:
            round_number: the rounds before it.
            chain: the digest of the head.
            state: the digest of the outer state; empty where peers share none.
            voters: the digest of the electorate.
        """
        parts = b"".join(hashlib.sha256(part).digest() for part in (chain, state, voters))
        return cls(round_number, hashlib.sha256(b"murmur trust %d " % round_number + parts).digest()[:MARK_BYTES])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text of a trust point. Raises MalformedError."""
        found = re.fullmatch(TRUST_PATTERN, text.strip())
        if found is None or int(found[1]) > MAX_ROUNDS:
            raise MalformedError("a trust point looks like 1234-9f3c21aa5b0e77d41c09a3e2f6d4b810")
        return cls(int(found[1]), bytes.fromhex(found[2]))

    def __str__(self) -> str:
        return f"{self.round}-{self.mark.hex()}"


def sign(identity: Identity, kind: str, run_id: RunId, body: Message) -> murmur_pb2.Signed:
    encoded = body.SerializeToString(deterministic=True)
    signature = identity.sign(_signed_bytes(kind, run_id, encoded))
    return murmur_pb2.Signed(kind=kind, peer=identity.peer_id, body=encoded, signature=signature)


def open_signed(
    signed: murmur_pb2.Signed, run_id: RunId, kind: str, message_type: type[MessageT], max_bytes: int = MAX_BODY_BYTES
) -> MessageT:
    """Return the body of a message that its peer signed for this run.

    Raises:
        MalformedError: The message is of another kind, too long, not canonical, or does not parse.
        ForgedError: The signature is wrong.
    """
    body = read_unverified(signed, kind, message_type, max_bytes)
    verify_signed(signed, run_id)
    return body


def read_unverified(
    signed: murmur_pb2.Signed, kind: str, message_type: type[MessageT], max_bytes: int = MAX_BODY_BYTES
) -> MessageT:
    """Parse the body without verifying its signature.

    This decides cheaply whether the verification is worth its time.
    """
    _check_envelope(signed, kind, max_bytes)
    body = message_type()
    try:
        body.ParseFromString(signed.body)
    except DecodeError as error:
        raise MalformedError(f"a {kind} message of {signed.peer} does not parse") from error
    body.DiscardUnknownFields()
    if body.SerializeToString(deterministic=True) != signed.body:
        raise MalformedError(f"a {kind} message of {signed.peer} is not in canonical form")
    return body


def verify_signed(signed: murmur_pb2.Signed, run_id: RunId) -> None:
    """Raise ForgedError unless the named peer signed the message.

    The signature covers the run and the kind.
    """
    signed_bytes = _signed_bytes(signed.kind, run_id, signed.body)
    (_verify_cached if len(signed_bytes) <= MAX_CACHED_MESSAGE_BYTES else verify)(
        signed.peer, signed_bytes, signed.signature
    )


@lru_cache(maxsize=MAX_CACHED_SIGNATURES)
def _verify_cached(peer: PeerId, signed_bytes: bytes, signature: bytes) -> None:
    """Verify a signature, caching success.

    A contribution arrives from its author, in a roster and in a commit.
    """
    verify(peer, signed_bytes, signature)


def _check_envelope(signed: murmur_pb2.Signed, kind: str, max_bytes: int) -> None:
    public_key(signed.peer)  # checked first, because the errors below quote the id
    if signed.kind != kind:
        raise MalformedError(f"{signed.peer} sent a message of another kind instead of {kind}")
    if len(signed.body) > max_bytes:
        size = len(signed.body)
        raise MalformedError(
            f"a {kind} message of {signed.peer} has {size} bytes; at most {max_bytes} bytes are allowed"
        )
    if len(signed.signature) != SIGNATURE_BYTES:
        raise MalformedError(f"a {kind} message of {signed.peer} has a signature of {len(signed.signature)} bytes")
    if len(UnknownFieldSet(signed)):
        raise MalformedError(f"a {kind} message of {signed.peer} has unknown fields")


def _signed_bytes(kind: str, run_id: RunId, body: bytes) -> bytes:
    return b"\0".join((DOMAIN, kind.encode(), bytes.fromhex(run_id) + body))


def peer_id_of(address: str) -> PeerId:
    """Return the peer id at the end of a multiaddress.

    Raises MalformedError if there is none.
    """
    _, separator, peer = address.rpartition("/p2p/")
    if not separator:
        raise MalformedError(f"{address[:200]!r} does not end in /p2p/<peer id>")
    public_key(peer)
    return peer


SIGNATURE_LINES = re.compile(
    rb"(?:# voucher (?P<host>[1-9A-HJ-NP-Za-km-z]{52}) (?P<voucher>[A-Za-z0-9+/]{86}==)\n)?"
    rb"# organiser (?P<organiser>[1-9A-HJ-NP-Za-km-z]{52})\n"
    rb"# signature (?P<signature>[A-Za-z0-9+/]{86}==)\n\Z"
)


TRUST_LINE = re.compile(rb"\n# trust (" + TRUST_PATTERN.encode() + rb")\n\Z")


# A comment that begins like a line of a signature: the word alone, or before a long token. A sentence that begins with
# the word and a key that is commented out (`# organiser = "Ada"`) do not. The
# patterns have no nested repetition, so that the time does not grow with the square of a hostile line.
LINE_START = re.compile(rb"[^\w\"']*")


SIGNATURE_WORD = re.compile(rb"(?:organiser|signature|voucher)(?:\W{0,8}\Z|\W{1,8}[A-Za-z0-9+/]{20})", re.IGNORECASE)


SIGNER = re.compile(rb"(?:organiser|voucher)\W{1,8}12D3Koo", re.IGNORECASE)


MAX_SIGNATURE_LINES_BYTES = 360


MAX_SIGNED_MANIFEST_BYTES = MAX_MANIFEST_BYTES + MAX_SIGNATURE_LINES_BYTES


VOUCHER_KIND = "host"
VOUCHER_PATTERN = re.compile(r"(?P<host>[1-9A-HJ-NP-Za-km-z]{52}) (?P<signature>[A-Za-z0-9+/]{86}==)")


@dataclass(frozen=True)
class Voucher:
    """The organiser's statement that a host serves its run; `signature` covers the run and the key of the host."""

    organiser: PeerId
    host: PeerId
    signature: bytes

    @classmethod
    def issue(cls, organiser: Identity, run_id: RunId, host: PeerId) -> Self:
        """Sign the key of a host."""
        signature = organiser.sign(_signed_bytes(VOUCHER_KIND, run_id, host.encode()))
        return cls(organiser.peer_id, host, signature)

    @classmethod
    def parse(cls, text: str, organiser: PeerId) -> Self:
        """Read the line of a voucher, whose signature is not verified. Raises MalformedError."""
        found = VOUCHER_PATTERN.fullmatch(text.strip())
        if found is None:
            raise MalformedError("a voucher is one line with the host's key and a signature; copy all of it")
        return cls(organiser, found["host"], base64.b64decode(found["signature"]))

    def verify(self, run_id: RunId) -> None:
        """Raise ForgedError unless the organiser signed the host's key for this run; MalformedError for a bad key."""
        verify(self.organiser, _signed_bytes(VOUCHER_KIND, run_id, self.host.encode()), self.signature)

    def __str__(self) -> str:
        return f"{self.host} {base64.b64encode(self.signature).decode()}"


@dataclass(frozen=True)
class SignedManifest:
    """A manifest and the key that people pin: its organiser's, or that of a host for which no organiser vouches.

    `organiser` is None if nobody signed the manifest.
    """

    manifest: Manifest
    organiser: PeerId | None
    trust: TrustPoint | None = None  # of the organiser's host, if it signed one
    text: ManifestText = field(compare=False, repr=False, default=ManifestText("", ""))  # to find the line of a key


def sign_manifest(
    manifest: Manifest, identity: Identity, trust: TrustPoint | None = None, voucher: Voucher | None = None
) -> bytes:
    """Return the manifest's text with its signature, and with a trust point and a voucher if there is one."""
    text = manifest.published().to_toml().encode() + (f"# trust {trust}\n".encode() if trust else b"")
    signature = base64.b64encode(identity.sign(_signed_manifest_bytes(text))).decode()
    vouched = f"# voucher {voucher}\n" if voucher else ""
    organiser = voucher.organiser if voucher else identity.peer_id
    return text + f"{vouched}# organiser {organiser}\n# signature {signature}\n".encode()


def open_signed_manifest(text: bytes, origin: str) -> SignedManifest:
    """Verify and parse a manifest.

    `origin` names the text in errors.

    Raises:
        ManifestError: The manifest is invalid.
        OrganiserError: The signature is wrong or damaged, or the organiser does not vouch for the host.
    """
    match = SIGNATURE_LINES.search(text[-MAX_SIGNATURE_LINES_BYTES:])
    body = text[: len(text) - len(match[0])] if match else text
    _refuse_damaged_signature(body, origin)
    if match is None:
        return SignedManifest(parse_manifest(body, origin), None, None, decode_text(body, origin))
    organiser, signer = match["organiser"].decode(), (match["host"] or match["organiser"]).decode()
    try:
        verify(signer, _signed_manifest_bytes(body), base64.b64decode(match["signature"], validate=True))
    except (PeerFault, binascii.Error) as error:
        raise OrganiserError(
            f"{origin}: the text is not what {signer} signed; get it again, or remove the last "
            f"{'three' if match['host'] else 'two'} lines of a file that you changed yourself"
        ) from error
    manifest = parse_manifest(body, origin)
    if match["voucher"]:
        signature = base64.b64decode(match["voucher"], validate=True)
        _require_voucher(manifest, Voucher(organiser, signer, signature), origin)
    found = TRUST_LINE.search(body[-MAX_SIGNATURE_LINES_BYTES:])
    trust = TrustPoint.parse(found[1].decode()) if found else None
    return SignedManifest(manifest, organiser, trust, decode_text(body, origin))


def _require_voucher(manifest: Manifest, voucher: Voucher, origin: str) -> None:
    """Raise OrganiserError unless the organiser of the run vouches for the host."""
    is_right = voucher.organiser == manifest.run.organiser_key
    try:
        if is_right:
            voucher.verify(manifest.run_id)
    except PeerFault:
        is_right = False
    if not is_right:
        raise OrganiserError(
            f"{origin}: the run's organiser does not vouch for the host {voucher.host}, as the text claims; ask the "
            "organiser for the line to join"
        )


def load_signed_manifest(path: Path) -> SignedManifest:
    """Read a manifest that a user names, and verify its signature if it has one.

    Raises MissingFileError, ManifestError or OrganiserError, one line that says what to fix.
    """
    return open_signed_manifest(read_manifest_bytes(path, MAX_SIGNED_MANIFEST_BYTES), str(path))


def _refuse_damaged_signature(body: bytes, origin: str) -> None:
    """Raise OrganiserError if the part of a manifest above its signature has a line of another or a damaged one."""
    for number, line in enumerate(body.split(b"\n"), 1):
        if _is_like_signature(line):
            raise OrganiserError(
                f"{origin}: line {number} begins like a signature, but the file does not end in a whole one; get the "
                "file again, unchanged, or remove that line (and the other one of the two) from a file of your own"
            )


def _is_like_signature(line: bytes) -> bool:
    start = LINE_START.match(line)
    assert start is not None  # it matches the empty text
    is_comment = b"#" in start[0] and SIGNATURE_WORD.match(line, start.end()) is not None
    return is_comment or (b"#" in line and SIGNER.search(line) is not None)


def fingerprint(organiser: PeerId) -> str:
    """Return half of the key's SHA-256 in groups that two people can compare.

    The form is `9f3c 21aa ...`.
    """
    digest = hashlib.sha256(public_key(organiser).public_bytes_raw()).hexdigest()[:32]
    return " ".join(digest[start : start + 4] for start in range(0, len(digest), 4))


def _signed_manifest_bytes(text: bytes) -> bytes:
    return b"\0".join((DOMAIN, b"manifest", text))
