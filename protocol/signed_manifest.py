"""A manifest as its organiser publishes it: the TOML text, and below it two comments that tell who signed it.

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

from protocol.errors import OrganiserError, PeerFault
from protocol.identity import Identity, PeerId, public_key, verify
from protocol.manifest import MAX_MANIFEST_BYTES, Manifest, parse_manifest
from protocol.records import DOMAIN

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
