"""The key of a peer: one Ed25519 key that is its libp2p identity and signs the peer's messages.

The file holds libp2p's `PrivateKey` message, which p2pd reads unchanged. A peer id is the base58 form of the "identity"
multihash of libp2p's `PublicKey` message, so it contains the public key, and a signature can be verified with the id
alone. Layout of both: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import Self

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import ForgedError, IdentityError, MalformedError
from protocol.files import create_atomically

PeerId = str  # 52 characters, 12D3KooW...

PEER_ID_LENGTH = 52
KEY_BYTES = 32
# Field 1 (key type) is 1 for Ed25519; field 2 is the key: 64 bytes (seed, then public key) or 32.
PRIVATE_HEADER = bytes.fromhex("08011240")
# Multihash code 0 ("identity"), 36 bytes long, then the header of libp2p's message.
PUBLIC_HEADER = bytes.fromhex("0024") + bytes.fromhex("08011220")
PRIVATE_FILE_BYTES = len(PRIVATE_HEADER) + 2 * KEY_BYTES


class Identity:
    """An Ed25519 private key and its peer id."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id: PeerId = _peer_id(key.public_key().public_bytes_raw())

    @classmethod
    def create(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Load the key from the file, creating it if it does not exist.

        Raises IdentityError if it is unusable.
        """
        try:
            return cls._load(path)
        except FileNotFoundError:
            return cls._store_new(path)
        except OSError as error:
            raise IdentityError(f"cannot read the key {path}: {error.strerror}; make it readable for you") from error

    @classmethod
    def _load(cls, path: Path) -> Self:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise IdentityError(f"others can read the key {path} (mode {mode:04o}); run: chmod 600 {path}")
            content = file.read(PRIVATE_FILE_BYTES + 1)
        seed, public = content[len(PRIVATE_HEADER) : -KEY_BYTES], content[-KEY_BYTES:]
        if len(content) == PRIVATE_FILE_BYTES and content.startswith(PRIVATE_HEADER):
            key = Ed25519PrivateKey.from_private_bytes(seed)
            if key.public_key().public_bytes_raw() == public:
                return cls(key)
        raise IdentityError(f"{path} is not an Ed25519 key; restore it from a copy, or remove it to become a new peer")

    @classmethod
    def _store_new(cls, path: Path) -> Self:
        identity = cls.create()
        try:
            create_atomically(path, identity.to_bytes())
        except FileExistsError:  # another process was faster; both must be the same peer
            return cls._load(path)
        except OSError as error:
            message = f"cannot write the key {path}: {error.strerror}; name a folder that you may write to"
            raise IdentityError(message) from error
        return identity

    def to_bytes(self) -> bytes:
        """Return the `PrivateKey` message that the file holds."""
        return PRIVATE_HEADER + self._key.private_bytes_raw() + self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of a message."""
        return self._key.sign(message)

    @property
    def private_key(self) -> Ed25519PrivateKey:
        """Return the key for TLS.

        The bytes that TLS signs cannot be confused with those of our messages.
        """
        return self._key


def _peer_id(public: bytes) -> PeerId:
    return base58.b58encode(PUBLIC_HEADER + public).decode()


@lru_cache(maxsize=4096)
def public_key(peer_id: PeerId) -> Ed25519PublicKey:
    """Return the key in a peer id.

    Raises MalformedError unless it is the canonical id of an Ed25519 key.
    """
    # Check the length first: decoding takes quadratic time, and the text may come from a peer.
    if len(peer_id) != PEER_ID_LENGTH:
        raise MalformedError(f"a peer id has {PEER_ID_LENGTH} characters, not {len(peer_id)}")
    try:
        content = base58.b58decode(peer_id)
    except ValueError as error:
        raise MalformedError(f"peer id {peer_id!r} is not base58") from error
    public = content[len(PUBLIC_HEADER) :]
    if len(public) != KEY_BYTES or _peer_id(public) != peer_id:
        raise MalformedError(f"peer id {peer_id!r} does not contain an Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(public)


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> None:
    """Raise ForgedError unless the peer signed the message.

    Raises MalformedError for an invalid peer id.
    """
    try:
        public_key(peer_id).verify(signature, message)
    except InvalidSignature as error:
        raise ForgedError(f"the signature is not {peer_id}'s") from error
