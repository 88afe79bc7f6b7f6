"""Open the RUN of `murmur join RUN`.

RUN is one of:

    a file           trusted by the user; if it is signed, the signature must be valid
    https://...      must be signed; the first key is pinned, and any other key is refused from then on
    http://...       the same, but only from this machine and private networks, unless --insecure is given
    murmur://...     fetched from that peer; needs no signature, because the run id is the hash of the manifest

A manifest from a URL or a link must not name files of this machine: its paths are relative to the node's folder `data`.
`node.commands.join.joined_folder` pins the organiser's key and resumes a run without its source.
"""

import asyncio
import ipaddress
import logging
import re
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult

from node.commands.join.http_download import download, split_url
from node.daemon.peers.peer_rpc import await_reply
from node.run_file import load_run_file
from node.units import multiaddress_fault
from protocol.errors import (
    ManifestError,
    MissingFileError,
    OrganiserError,
    PeerFault,
    UnreachableError,
    UsageError,
)
from protocol.identity import PeerId
from protocol.manifest.reading import ManifestText, decode_text, parse_manifest
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import ManifestReply, ManifestRequest
from protocol.murmur_pb2_grpc import RunsStub
from protocol.signing import (
    MAX_SIGNED_MANIFEST_BYTES,
    SignedManifest,
    TrustPoint,
    open_signed_manifest,
)

logger = logging.getLogger(__name__)

DOWNLOAD_SECONDS = 20.0
PEER_SECONDS = 30.0
MAX_SHOWN_CHARACTERS = 200
BARE_ADDRESS_PATTERN = re.compile(r"^([\w-]+\.[\w.-]+(:\d+)?|[\w-]+:\d+)/")
SCHEME_PATTERN = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
LINK_PATTERN = re.compile(r"^murmur://(?P<run>[0-9a-f]{64})@(?P<address>/\S{1,400})$")


@dataclass(frozen=True)
class Invitation:
    """A run to join, from the file, URL or link `source`.

    Relative paths start at `base`, or in the folder `data` of the node if it is `None`. `folder` is the node's folder
    if the run was found there. `trust` is the newest round that the organiser's host has signed with the manifest.
    """

    manifest: Manifest
    organiser: PeerId | None
    base: Path | None
    source: str | None = None
    peers: tuple[str, ...] = ()
    folder: Path | None = None
    trust: TrustPoint | None = None
    text: ManifestText = field(compare=False, repr=False, default=ManifestText("", ""))

    @property
    def is_downloaded(self) -> bool:
        """Return whether the manifest came from a URL or a link, so that somebody else chose its values."""
        return self.base is None


def normalize_run(run: str) -> str:
    """Return a URL or link without the blanks around it, and with a scheme in lower case; a path as it is."""
    address = run.strip()
    found = SCHEME_PATTERN.match(address)
    return found[1].lower() + address[found.end(1) :] if found else run


def open_invitation(run: str, insecure: bool) -> Invitation:
    """Read or fetch the manifest of the run. Raises MurmurError, one line that says what to do."""
    run = normalize_run(run)
    if run.startswith("murmur://"):
        return _open_link(run)
    if run.startswith(("http://", "https://")):
        return _open_url(run, insecure)
    if SCHEME_PATTERN.match(run):
        shown = run[:MAX_SHOWN_CHARACTERS]
        raise UsageError(f"{shown} is not a run; give a file, an http(s) URL or murmur://RUN_ID@MULTIADDRESS")
    return _open_file(Path(run))


def _open_file(path: Path) -> Invitation:
    if not _exists(path) and BARE_ADDRESS_PATTERN.match(str(path)):
        raise MissingFileError(f"there is no file {path}; if it is a URL, begin it with https:// (or http://)")
    signed = load_run_file(path)
    if not path.is_file():  # a pipe, as in `murmur join <(curl ...)`
        return Invitation(signed.manifest, signed.organiser, Path.cwd(), text=signed.text)
    source = str(path.resolve())
    return Invitation(signed.manifest, signed.organiser, path.parent.resolve(), source, text=signed.text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        return False


def _open_url(url: str, insecure: bool) -> Invitation:
    parts = split_url(url)
    logger.info("asking %s for the run", url)
    if parts.scheme == "http" and not insecure:
        _require_private_host(parts)
    signed = _read_with_version_hint(lambda: open_signed_manifest(_download(url), url))
    if signed.organiser is None:
        raise OrganiserError(f"{url} is not signed; ask for the URL that `murmur host` prints, or get it as a file")
    require_paths_inside(signed.manifest)
    return Invitation(signed.manifest, signed.organiser, None, source=url, trust=signed.trust, text=signed.text)


def _download(url: str) -> bytes:
    return download(url, MAX_SIGNED_MANIFEST_BYTES, DOWNLOAD_SECONDS)


def _read_with_version_hint(read: Callable[[], SignedManifest]) -> SignedManifest:
    try:
        return read()
    except ManifestError as error:
        raise ManifestError(f"{error} (the run may need another version of murmur)") from error


def _require_private_host(parts: SplitResult) -> None:
    """Raise OrganiserError for a public host: without TLS, an attacker could replace the key at the first visit."""
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"cannot find the host {parts.hostname}; check the address and the network") from error
    if any(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_global for address in found):
        raise OrganiserError(
            f"{parts.hostname} is on the internet and plain http:// can be altered in transit; use https://, or "
            "--insecure if you compare the fingerprint yourself"
        )


def _open_link(link: str) -> Invitation:
    found = LINK_PATTERN.match(link)
    if not found:
        raise UsageError(
            "write it like murmur://RUN_ID@/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...; see `murmur join -h`"
        )
    run_id, address = found["run"], found["address"]
    if fault := multiaddress_fault(address) or (None if "/p2p/" in address else "does not end in /p2p/ and a peer id"):
        raise UsageError(f"{address} {fault}; copy the whole link")
    logger.info("asking %s for the run", address)
    text = asyncio.run(_request_manifest(run_id, address))
    manifest = _read_with_version_hint(lambda: SignedManifest(parse_manifest(text, link), None)).manifest
    if manifest.run_id != run_id:
        raise OrganiserError(f"{address} sent the manifest of another run; ask for a new link")
    require_paths_inside(manifest)
    return Invitation(manifest, None, None, link, (address,), text=decode_text(text, link))


async def _request_manifest(run_id: str, address: str) -> bytes:
    """Request the manifest with a temporary key, because the user has not joined anything yet."""
    from protocol.transport.transport import Transport  # takes seconds; a wrong URL must fail before

    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        transport = await Transport.start(Path(folder) / "key", Path(folder), [])
        try:
            peer = await transport.connect(address, PEER_SECONDS)
            stub, request = RunsStub(transport.channel(peer)), ManifestRequest(run=bytes.fromhex(run_id))
            try:
                reply: ManifestReply = await await_reply(peer, lambda: stub.Manifest(request, timeout=PEER_SECONDS))
            except (UnreachableError, PeerFault) as fault:
                raise UnreachableError(f"{address} does not send the manifest: {fault}; try another peer") from fault
        finally:
            await transport.stop()
    return reply.toml


def require_paths_inside(manifest: Manifest) -> None:
    """Raise OrganiserError if a manifest from a URL or link names files outside the node's folder."""
    if manifest.model.from_:
        raise OrganiserError("model.from names a place on another machine; ask for the link that `murmur host` prints")
    paths = [(f"{source.key}.path", source.path) for source in manifest.data.mixture]
    for key, path in (*paths, ("data.tokenizer", manifest.data.tokenizer)):
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path.startswith("~"):
            raise OrganiserError(
                f"{key} = {path[:80]!r} is outside the node's folder, and a downloaded manifest may not name such "
                "files; ask the organiser for a manifest with relative paths"
            )
