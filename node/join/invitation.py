"""What `murmur join RUN` is given: a file, an http(s) address, or murmur://RUN_ID@MULTIADDRESS.

    a file           is the person's own word; where it is signed, the signature must be right
    https://...      must be signed; the first key seen is kept, and another one is refused from then on
    http://...       the same, but only to this machine and to private networks, unless --insecure is given
    murmur://...     is fetched from that peer and needs no signature: the run id is the hash of what comes

A manifest from elsewhere may not name files of this machine: its paths lead into the folder `data` of the node.

Whose run a folder belongs to: the organiser's key is kept at the first visit, and another one refused from then on.

    DIR/organiser.json   {"organiser": peer id, "source": the address it came from}

An address is also looked up in the folders of all other runs joined here: whoever takes over a web server cannot put
a run of another key in the place of the old one unnoticed.
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
    """A run to join. `base`: where relative paths start, None for the node's own folder; `source`: the address."""

    manifest: Manifest
    organiser: PeerId | None
    base: Path | None
    source: str | None = None
    peers: tuple[str, ...] = ()


def open_invitation(run: str, insecure: bool) -> Invitation:
    """Read or fetch it. Raises MurmurError, one line that says what to do."""
    if run.startswith("murmur://"):
        return asyncio.run(_open_link(run))
    if run.startswith(("http://", "https://")):
        return _open_url(run, insecure)
    if "://" in run:
        raise UsageError(f"{run} is no run; give a file, an http(s) address or murmur://RUN_ID@MULTIADDRESS")
    return _open_file(Path(run))


def _open_file(path: Path) -> Invitation:
    if not path.exists() and BARE_ADDRESS_PATTERN.match(str(path)):
        raise MissingFileError(f"there is no file {path}; if it is an address, begin it with https:// (or http://)")
    load_manifest(path)  # says what is wrong with a file, and where
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
        raise OrganiserError(f"{url} is not signed; ask for the address that `murmur host` prints, or get it as a file")
    require_paths_inside(signed.manifest)
    return Invitation(signed.manifest, signed.organiser, None, source=url)


def _read_with_version_hint(read: Callable[[], SignedManifest]) -> SignedManifest:
    try:
        return read()
    except ManifestError as error:
        raise ManifestError(f"{error} (the run may need another version of murmur)") from error


def _download(url: str) -> bytes:
    """At most MAX_SIGNED_BYTES, within DOWNLOAD_SECONDS; follows no redirect."""

    async def fetch() -> bytes:
        async with asyncio.timeout(DOWNLOAD_SECONDS), httpx2.AsyncClient(timeout=DOWNLOAD_SECONDS) as client:
            return await _read_body(client, url)

    try:
        return asyncio.run(fetch())
    except (TimeoutError, httpx2.HTTPError, httpx2.InvalidURL, ssl.SSLError) as error:
        reason = describe_error(error)
        if "WRONG_VERSION_NUMBER" in reason:
            reason = "what answers there does not speak https"
        raise UnreachableError(f"cannot get {url}: {reason}; check the address and the network") from error


async def _read_body(client: httpx2.AsyncClient, url: str) -> bytes:
    text = bytearray()
    async with client.stream("GET", url) as response:
        if response.is_redirect:
            place = response.headers.get("location", "elsewhere")[:200]
            raise UsageError(f"{url} has moved to {place}; join that address")
        if response.status_code != 200:
            raise UnreachableError(f"{url} answers with {response.status_code}; check the address")
        if response.headers.get("content-type", "").startswith("text/html"):
            raise UsageError(f"{url} is a page for people; join the address of its run.toml, which stands on it")
        async for chunk in response.aiter_bytes():
            text += chunk
            if len(text) > MAX_SIGNED_MANIFEST_BYTES:
                raise ManifestError(
                    f"{url} is no manifest, it is over {MAX_SIGNED_MANIFEST_BYTES} bytes; check the address"
                )
    return bytes(text)


def _require_private_host(parts: SplitResult) -> None:
    """Without TLS anyone on the way could put another key in at the first visit."""
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError(f"cannot find {parts.hostname}: {error.strerror}; check the address") from error
    if any(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_global for address in found):
        raise OrganiserError(
            f"{parts.hostname} is out on the internet and http:// can be altered on the way; use https://, or "
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
        raise OrganiserError(f"{address} gave the manifest of another run; ask whoever gave you the link")
    require_paths_inside(manifest)
    return Invitation(manifest, None, None, peers=(address,))


async def _request_manifest(run_id: str, address: str) -> bytes:
    """Under a key that is thrown away: nobody has joined anything yet."""
    from protocol.transport.transport import Transport  # takes seconds: not before a web address has turned out wrong

    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        transport = await Transport.start(Path(folder) / "key", Path(folder), [])
        try:
            peer = await transport.connect(address, PEER_SECONDS)
            stub, request = RunsStub(transport.channel(peer)), ManifestRequest(run=bytes.fromhex(run_id))
            try:
                reply: ManifestReply = await await_reply(peer, lambda: stub.Manifest(request, timeout=PEER_SECONDS))
            except (UnreachableError, PeerFault) as fault:
                raise UnreachableError(f"{address} does not tell the run: {fault}; try another peer") from fault
        finally:
            await transport.stop()
    return reply.toml


def require_paths_inside(manifest: Manifest) -> None:
    """OrganiserError where a manifest from elsewhere would read files that are not meant for it."""
    for key, path in (("data.path", manifest.data.path), ("data.tokenizer", manifest.data.tokenizer)):
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path.startswith("~"):
            raise OrganiserError(
                f"{key} = {path[:80]!r} leads out of the node's folder, and a run from elsewhere may not name files "
                "here; ask the organiser for a manifest with relative paths"
            )


ORGANISER_FILE = "organiser.json"
MANIFEST_FILE = "run.toml"


@dataclass(frozen=True)
class OrganiserPin:
    path: Path
    organiser: PeerId
    source: str | None


def check_pin(folder: Path, invitation: Invitation) -> bool:
    """Whether the key is new here. Raises OrganiserError for one that is not the first."""
    if invitation.organiser is None:
        return False
    own = _read_pin(folder / ORGANISER_FILE)
    others = _pins_from_source(state_home().glob(f"*/{ORGANISER_FILE}"), invitation.source) if invitation.source else []
    for pin in [own, *others]:
        if pin is not None and pin.organiser != invitation.organiser:
            raise OrganiserError(_changed_key_text(pin, invitation.organiser))
    return own is None


def recall_invitation(source: str, folder: Path | None) -> Invitation | None:
    """The run that was joined before from that address, in that folder or (None) in any; the one joined last."""
    paths = [folder / ORGANISER_FILE] if folder else state_home().glob(f"*/{ORGANISER_FILE}")
    found = [pin for pin in _pins_from_source(paths, source) if (pin.path.parent / MANIFEST_FILE).exists()]
    if not found:
        return None
    pin = max(found, key=lambda pin: (pin.path.parent / MANIFEST_FILE).stat().st_mtime)
    return Invitation(load_manifest(pin.path.parent / MANIFEST_FILE), pin.organiser, None, source)


def save_pin(folder: Path, invitation: Invitation) -> None:
    """Raises StorageError."""
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
        raise OrganiserError(f"{path} cannot be read; restore it, or remove it and compare the fingerprint") from error
