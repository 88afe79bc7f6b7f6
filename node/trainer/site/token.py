"""The token of a site: the public key of its first machine, and the secret with which other machines join."""

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import base58

from node.options import NodeOptions
from node.run_dir import RunDir
from node.units import ALL_INTERFACES, parse_host_port
from protocol.errors import UsageError
from protocol.identity import KEY_BYTES, PUBLIC_HEADER, Identity, PeerId, public_key

SECRET_BYTES: Final = 32
MAX_TOKEN_CHARACTERS: Final = 100  # decoding takes quadratic time
_PURPOSE: Final = b"murmur/1\0site"


@dataclass(frozen=True)
class SiteToken:
    """Lets a machine join the ranks of the first one, where it can read and change the weights."""

    head: PeerId
    secret: str = field(repr=False)

    @classmethod
    def of(cls, identity: Identity) -> Self:
        """Return the token of a first machine with this key."""
        key = identity.private_key.private_bytes_raw()
        return cls(identity.peer_id, hmac.new(key, _PURPOSE, hashlib.sha256).hexdigest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text that the first machine prints. Raises UsageError."""
        try:
            content = base58.b58decode(text.strip()[:MAX_TOKEN_CHARACTERS])
        except ValueError:
            content = b""
        if len(content) != KEY_BYTES + SECRET_BYTES:
            raise UsageError("--token: this is not a token; copy the line that the first machine prints")
        head = base58.b58encode(PUBLIC_HEADER + content[:KEY_BYTES]).decode()
        return cls(head, content[KEY_BYTES:].hex())

    def admits(self, secret: str) -> bool:
        """Return whether a caller's secret is this one."""
        return hmac.compare_digest(self.secret.encode(), secret.encode())

    def __str__(self) -> str:
        # One base58 string of both, because logs shorten peer ids and digests.
        return base58.b58encode(public_key(self.head).public_bytes_raw() + bytes.fromhex(self.secret)).decode()


def load_site_key(path: Path) -> Identity:
    """Load the key of a site's first machine, or create it."""
    return Identity.load_or_create(path)


def describe_site(settings: NodeOptions, run_dir: RunDir) -> str:
    """Return the command that adds another machine to this node's site."""
    assert settings.site is not None
    host, port = parse_host_port(settings.site, "--site")
    shown = "THIS-MACHINE" if host in ALL_INTERFACES else f"[{host}]" if ":" in host else host
    return f"murmur rank {shown}:{port} --token {SiteToken.of(load_site_key(run_dir.site_key))}"
