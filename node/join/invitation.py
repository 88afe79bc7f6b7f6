"""Open the RUN of `murmur join RUN`, and pin its organiser's key.

RUN is one of:

    a file           trusted by the user; if it is signed, the signature must be valid
    https://...      must be signed; the first key is pinned, and any other key is refused from then on
    http://...       the same, but only from this machine and private networks, unless --insecure is given
    murmur://...     fetched from that peer; needs no signature, because the run id is the hash of the manifest

A manifest from a URL or a link must not name files of this machine: its paths are relative to the node's folder `data`.

The pin says which organiser a folder belongs to:

    DIR/organiser.json   {"organiser": peer id, "source": the URL of the manifest}

A URL is also compared with the pins of all other runs joined on this machine, so that an attacker who takes over a web
server cannot replace the run by one of another key unnoticed.
"""

import asyncio
import ipaddress
import json
import re
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, urlsplit

import httpx2

from node.daemon.peer_rpc import await_reply
from node.paths import state_home
from node.run_dir import write_atomically
from protocol.errors import (
    MalformedError,
    ManifestError,
    MissingFileError,
    OrganiserError,
    PeerFault,
    UnreachableError,
    UsageError,
    describe_error,
)
from protocol.identity import PeerId
from protocol.manifest import Manifest, load_manifest, parse_manifest
from protocol.murmur_pb2 import ManifestReply, ManifestRequest
from protocol.murmur_pb2_grpc import RunsStub
from protocol.signing import MAX_SIGNED_MANIFEST_BYTES, SignedManifest, fingerprint, open_signed_manifest, peer_id_of

DOWNLOAD_SECONDS = 20.0
PEER_SECONDS = 30.0
BARE_ADDRESS_PATTERN = re.compile(r"^([\w-]+\.[\w.-]+(:\d+)?|[\w-]+:\d+)/")
LINK_PATTERN = re.compile(r"^murmur://(?P<run>[0-9a-f]{64})@(?P<address>/\S{1,400})$")


@dataclass(frozen=True)
class Invitation:
    """A run to join, from the URL `source`; relative paths start at `base`, or in the node's folder if it is `None`."""

    manifest: Manifest
    organiser: PeerId | None
    base: Path | None
    source: str | None = None
    peers: tuple[str, ...] = ()


def open_invitation(run: str, insecure: bool) -> Invitation:
    """Read or fetch the manifest of the run. Raises MurmurError, one line that says what to do."""
    if run.startswith("murmur://"):
        return asyncio.run(_open_link(run))
    if run.startswith(("http://", "https://")):
        return _open_url(run, insecure)
    if "://" in run:
        raise UsageError(f"{run} is not a run; give a file, an http(s) URL or murmur://RUN_ID@MULTIADDRESS")
    return _open_file(Path(run))


def _open_file(path: Path) -> Invitation:
    if not path.exists() and BARE_ADDRESS_PATTERN.match(str(path)):
        raise MissingFileError(f"there is no file {path}; if it is a URL, begin it with https:// (or http://)")
    load_manifest(path)  # its errors name the fault and the line
    with path.open("rb") as file:
        signed = open_signed_manifest(file.read(MAX_SIGNED_MANIFEST_BYTES + 1), str(path))
    return Invitation(signed.manifest, signed.organiser, path.parent.resolve())


def _open_url(url: str, insecure: bool) -> Invitation:
    parts = urlsplit(url)
    if not parts.hostname:
        raise UsageError(f"{url} names no host; write it like https://run.example.org/run.toml")
    if parts.scheme == "http" and not insecure:
        _require_private_host(parts)
    signed = _read_with_version_hint(lambda: open_signed_manifest(_download(url), url))
    if signed.organiser is None:
        raise OrganiserError(f"{url} is not signed; ask for the URL that `murmur host` prints, or get it as a file")
    require_paths_inside(signed.manifest)
    return Invitation(signed.manifest, signed.organiser, None, source=url)


def _read_with_version_hint(read: Callable[[], SignedManifest]) -> SignedManifest:
    try:
        return read()
    except ManifestError as error:
        raise ManifestError(f"{error} (the run may need another version of murmur)") from error


def _download(url: str) -> bytes:
    """Download at most MAX_SIGNED_MANIFEST_BYTES within DOWNLOAD_SECONDS, without following redirects."""

    async def fetch() -> bytes:
        async with asyncio.timeout(DOWNLOAD_SECONDS), httpx2.AsyncClient(timeout=DOWNLOAD_SECONDS) as client:
            return await _read_body(client, url)

    try:
        return asyncio.run(fetch())
    except (TimeoutError, httpx2.HTTPError, httpx2.InvalidURL, ssl.SSLError) as error:
        reason = describe_error(error)
        if "WRONG_VERSION_NUMBER" in reason:
            reason = "the server does not speak https"
        raise UnreachableError(f"cannot get {url}: {reason}; check the address and the network") from error


async def _read_body(client: httpx2.AsyncClient, url: str) -> bytes:
    text = bytearray()
    async with client.stream("GET", url) as response:
        if response.is_redirect:
            location = response.headers.get("location", "elsewhere")[:200]
            raise UsageError(f"{url} has moved to {location}; join that URL")
        if response.status_code != 200:
            raise UnreachableError(f"{url} answers with {response.status_code}; check the address")
        if response.headers.get("content-type", "").startswith("text/html"):
            raise UsageError(f"{url} is a web page; join the URL of its run.toml, which the page shows")
        async for chunk in response.aiter_bytes():
            text += chunk
            if len(text) > MAX_SIGNED_MANIFEST_BYTES:
                raise ManifestError(
                    f"{url} is not a manifest (over {MAX_SIGNED_MANIFEST_BYTES} bytes); check the address"
                )
    return bytes(text)


def _require_private_host(parts: SplitResult) -> None:
    """Raise OrganiserError for a public host: without TLS, an attacker could replace the key at the first visit."""
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError(f"cannot find {parts.hostname}: {error.strerror}; check the address") from error
    if any(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_global for address in found):
        raise OrganiserError(
            f"{parts.hostname} is on the internet and plain http:// can be altered in transit; use https://, or "
            "--insecure if you compare the fingerprint yourself"
        )


async def _open_link(link: str) -> Invitation:
    found = LINK_PATTERN.match(link)
    if not found:
        raise UsageError(
            "write it like murmur://RUN_ID@/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...; see `murmur join -h`"
        )
    run_id, address = found["run"], found["address"]
    try:
        peer_id_of(address)
    except MalformedError as error:
        raise UsageError(f"{address} does not end in /p2p/ and a peer id; copy the whole link") from error
    text = await _request_manifest(run_id, address)
    manifest = _read_with_version_hint(lambda: SignedManifest(parse_manifest(text, link), None)).manifest
    if manifest.run_id != run_id:
        raise OrganiserError(f"{address} sent the manifest of another run; ask for a new link")
    require_paths_inside(manifest)
    return Invitation(manifest, None, None, peers=(address,))


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
    for key, path in (("data.path", manifest.data.path), ("data.tokenizer", manifest.data.tokenizer)):
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path.startswith("~"):
            raise OrganiserError(
                f"{key} = {path[:80]!r} is outside the node's folder, and a downloaded manifest may not name such "
                "files; ask the organiser for a manifest with relative paths"
            )


ORGANISER_FILE = "organiser.json"
MANIFEST_FILE = "run.toml"


@dataclass(frozen=True)
class OrganiserPin:
    """The pinned key of a folder's organiser."""

    path: Path
    organiser: PeerId
    source: str | None


def check_pin(folder: Path, invitation: Invitation) -> bool:
    """Return whether the folder has no pin yet. Raises OrganiserError if a pinned key differs from this one."""
    if invitation.organiser is None:
        return False
    own = _read_pin(folder / ORGANISER_FILE)
    others = _pins_from_source(state_home().glob(f"*/{ORGANISER_FILE}"), invitation.source) if invitation.source else []
    for pin in [own, *others]:
        if pin is not None and pin.organiser != invitation.organiser:
            raise OrganiserError(_changed_key_text(pin, invitation.organiser))
    return own is None


def recall_invitation(source: str, folder: Path | None) -> Invitation | None:
    """Return the run that was joined last from this URL, in `folder` or (`None`) in any folder."""
    paths = [folder / ORGANISER_FILE] if folder else state_home().glob(f"*/{ORGANISER_FILE}")
    found = [pin for pin in _pins_from_source(paths, source) if (pin.path.parent / MANIFEST_FILE).exists()]
    if not found:
        return None
    pin = max(found, key=lambda pin: (pin.path.parent / MANIFEST_FILE).stat().st_mtime)
    return Invitation(load_manifest(pin.path.parent / MANIFEST_FILE), pin.organiser, None, source)


def save_pin(folder: Path, invitation: Invitation) -> None:
    """Save the organiser's key in the folder. Raises StorageError."""
    values = {"organiser": invitation.organiser, "source": invitation.source}
    write_atomically(folder / ORGANISER_FILE, json.dumps(values).encode())


def _changed_key_text(pin: OrganiserPin, organiser: PeerId) -> str:
    return (
        f"the run is signed by another key ({fingerprint(organiser)}) than before ({fingerprint(pin.organiser)}): "
        f"ask the organiser; if the new key is right, remove {pin.path}"
    )


def _pins_from_source(paths: Iterable[Path], source: str) -> list[OrganiserPin]:
    return [pin for pin in map(_read_pin, paths) if pin is not None and pin.source == source]


def _read_pin(path: Path) -> OrganiserPin | None:
    try:
        values = json.loads(path.read_bytes())
        return OrganiserPin(path, str(values["organiser"]), values["source"] and str(values["source"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OrganiserError(f"cannot read {path}; restore it, or remove it and compare the fingerprint") from error
