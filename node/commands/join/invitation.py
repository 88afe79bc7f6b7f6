"""Open the RUN of `murmur join RUN`.

RUN is one of:

    a file           trusted by the user; if it is signed, the signature must be valid
    https://...      must be signed; the first key is pinned, and any other key is refused from then on
    http://...       the same, but only from this machine and private networks, unless --insecure is given
    murmur://...     fetched from that peer; needs no signature, because the run id is the hash of the manifest

A manifest from a URL or a link must not name files of this machine: its paths are relative to the node's folder `data`.
Nor does it make this machine call itself or a private network, unless it came from there: other bootstrap addresses are
dropped, and a person who means one names it with `--peer`.
The key of the organiser is pinned where it vouches for the host, else the host's key. A run is resumed without its
source.
"""

import asyncio
import ipaddress
import json
import logging
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult

from node.commands.join.http_download import download, split_url
from node.daemon.peers.peer_rpc import await_reply
from node.paths import joined_dirs
from node.run_file import load_run_file
from node.units import multiaddress_fault
from protocol.errors import (
    ManifestError,
    MissingFileError,
    MurmurError,
    OrganiserError,
    PeerFault,
    StorageError,
    UnreachableError,
    UsageError,
)
from protocol.files import write_atomically
from protocol.identity import PeerId
from protocol.manifest.model import HUB_SCHEME
from protocol.manifest.reading import ManifestText, decode_text, parse_manifest
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import ManifestReply, ManifestRequest
from protocol.murmur_pb2_grpc import RunsStub
from protocol.signing import (
    MAX_SIGNED_MANIFEST_BYTES,
    SignedManifest,
    TrustPoint,
    fingerprint,
    load_signed_manifest,
    open_signed_manifest,
)
from protocol.transport.dial_policy import endpoint_of, may_name, parse_ip
from protocol.transport.nat import IpAddress

logger = logging.getLogger(__name__)
DOWNLOAD_SECONDS = 20.0
PEER_SECONDS = 30.0
MAX_SHOWN_CHARACTERS = 200
BARE_ADDRESS_PATTERN = re.compile(r"^([\w-]+\.[\w.-]+(:\d+)?|[\w-]+:\d+)/")
SCHEME_PATTERN = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
LINK_PATTERN = re.compile(r"^murmur://(?P<run>[0-9a-f]{64})@(?P<address>/\S{1,400})$")
INVITATION_FILE = "invitation.json"
MANIFEST_FILE = "run.toml"
DATA = "data"  # in the node's folder: where the paths of a downloaded manifest start
MAX_SOURCES = 16


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
    manifest = keep_own_addresses(signed.manifest, _addresses_of(parts.hostname or ""))
    return Invitation(manifest, signed.organiser, None, source=url, trust=signed.trust, text=signed.text)


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


def keep_own_addresses(manifest: Manifest, sources: Sequence[IpAddress]) -> Manifest:
    """Return a manifest without the bootstrap addresses that the machine it came from, at `sources`, may not name."""
    named = {address: endpoint_of(address) for address in manifest.run.bootstrap}
    kept = tuple(
        address
        for address, endpoint in named.items()
        if endpoint is not None and may_name(_addresses_of(endpoint.host), sources)
    )
    if len(kept) < len(named):
        logger.debug("%d bootstrap addresses lead to private networks and are not used", len(named) - len(kept))
    return manifest.model_copy(update={"run": manifest.run.model_copy(update={"bootstrap": kept})})


def _addresses_of(host: str) -> tuple[IpAddress, ...]:
    """Return the addresses of a host; none for a name that does not exist now."""
    address = parse_ip(host)
    if address is not None:
        return (address,)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(address for entry in found if (address := parse_ip(str(entry[4][0]))) is not None)


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
    endpoint = endpoint_of(address)
    manifest = keep_own_addresses(manifest, _addresses_of(endpoint.host) if endpoint is not None else ())
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
    if manifest.model.from_ and not (manifest.adapter and manifest.model.from_.startswith(HUB_SCHEME)):
        raise OrganiserError("model.from names a place on another machine; ask for the link that `murmur host` prints")
    paths = [(f"{source.key}.path", source.path) for source in manifest.data.mixture]
    for key, path in (*paths, ("data.tokenizer", manifest.data.tokenizer)):
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path.startswith("~"):
            raise OrganiserError(
                f"{key} = {path[:80]!r} is outside the node's folder, and a downloaded manifest may not name such "
                "files; ask the organiser for a manifest with relative paths"
            )


@dataclass(frozen=True)
class SavedInvitation:
    """The content of a folder's invitation.json; `organiser` is pinned unless it is `None`."""

    path: Path
    organiser: PeerId | None
    sources: tuple[str, ...]
    base: Path | None

    def is_from(self, source: str) -> bool:
        return source_key(source) in map(source_key, self.sources)


def source_key(source: str) -> str:
    """Return the part of a source that stays the same: a link may name another peer of the same run."""
    return source.partition("@")[0] if source.startswith("murmur://") else source


def open_or_recall(run: str, folder: Path | None, insecure: bool) -> Invitation:
    """Open the invitation, or resume a run that was joined before: in the folder `run`, or from a source that is gone.

    A file that is damaged is not passed over, because its owner has just changed it; nor is a manifest that another key
    signed.
    """
    resumed = reopen_folder(Path(run))
    if resumed is not None:
        return resumed
    run = normalize_run(run)
    try:
        return open_invitation(run, insecure)
    except OrganiserError:
        raise
    except MurmurError as error:
        is_address = run.startswith(("http://", "https://", "murmur://"))
        if not (is_address or isinstance(error, MissingFileError)):
            raise
        recalled = recall_invitation(run if is_address else str(Path(run).absolute()), folder)
        if recalled is None:
            raise
        logger.warning("%s; continuing with the run that was joined from there before", error)
        return recalled


def check_pin(folder: Path, invitation: Invitation) -> bool:
    """Return whether the folder has no pin yet. Raises OrganiserError if a pinned key differs from this one."""
    if invitation.organiser is None:
        return False
    own = read_saved_invitation(folder)
    for saved in [own, *(_saved_from(joined_dirs(), invitation.source) if invitation.source else [])]:
        if (
            saved
            and saved.organiser not in (None, invitation.organiser)
            and not _is_joined_organiser(saved, invitation)
        ):
            raise OrganiserError(_changed_key_text(saved, invitation.organiser))
    return own is None or own.organiser is None


def _is_joined_organiser(saved: SavedInvitation, invitation: Invitation) -> bool:
    """Return whether the run that was joined with a host's key names the organiser that vouches for the host now."""
    path, organiser = saved.path.parent / MANIFEST_FILE, invitation.manifest.run.organiser_key
    if not organiser or invitation.organiser != organiser or not path.exists():
        return False
    return load_signed_manifest(path).manifest.run.organiser_key == organiser


def recall_invitation(source: str, folder: Path | None) -> Invitation | None:
    """Return the run that was joined last from this source, in `folder` or (`None`) in any folder."""
    found = [saved for saved in _saved_from([folder] if folder else joined_dirs(), source) if _has_manifest(saved)]
    if not found:
        return None
    return _reopen(max(found, key=lambda saved: (saved.path.parent / MANIFEST_FILE).stat().st_mtime), source)


def reopen_folder(folder: Path) -> Invitation | None:
    """Return the run of a node's folder; `None` if no node has run there."""
    try:
        if not ((folder / MANIFEST_FILE).exists() and (folder / "key").exists()):
            return None
    except (OSError, ValueError):  # the name is too long for a file, or has a NUL
        return None
    return _reopen(
        read_saved_invitation(folder) or SavedInvitation(folder / INVITATION_FILE, None, (), folder.resolve())
    )


def save_invitation(folder: Path, invitation: Invitation) -> None:
    """Save the run's organiser and source in the folder. Raises StorageError."""
    old = read_saved_invitation(folder)
    organiser = invitation.organiser or (old.organiser if old else None)
    sources = dict.fromkeys(old.sources if old else ())
    if invitation.source:
        sources |= {invitation.source: None}
    base = str(invitation.base) if invitation.base else None
    values = {"organiser": organiser, "sources": list(sources)[-MAX_SOURCES:], "base": base}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"cannot use the folder {folder}: {error.strerror}; choose another --dir") from error
    write_atomically(folder / INVITATION_FILE, json.dumps(values).encode())


def read_saved_invitation(folder: Path) -> SavedInvitation | None:
    """Return what the folder remembers, `None` if nothing. Raises OrganiserError for a damaged file."""
    path = folder / INVITATION_FILE
    try:
        values = json.loads(path.read_bytes())
        organiser, base = values["organiser"], values["base"]
        sources = tuple(str(source) for source in values["sources"])
        return SavedInvitation(path, organiser and str(organiser), sources, Path(base) if base else None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OrganiserError(f"cannot read {path}; restore it, or remove it and compare the fingerprint") from error


def text_base(folder: Path) -> Path:
    """Return the folder at which the paths of the run's text start, for a node's folder. Raises OrganiserError."""
    saved = read_saved_invitation(folder)
    return folder if saved is None else saved.base or folder / DATA


def _reopen(saved: SavedInvitation, source: str | None = None) -> Invitation:
    folder = saved.path.parent
    peers = (source.partition("@")[2],) if source and source.startswith("murmur://") else ()
    kept = load_signed_manifest(folder / MANIFEST_FILE)
    return Invitation(kept.manifest, saved.organiser, saved.base, source, peers, folder, text=kept.text)


def _saved_from(folders: Iterable[Path], source: str) -> list[SavedInvitation]:
    found = (read_saved_invitation(folder) for folder in folders)
    return [saved for saved in found if saved is not None and saved.is_from(source)]


def _has_manifest(saved: SavedInvitation) -> bool:
    return (saved.path.parent / MANIFEST_FILE).exists()


def _changed_key_text(saved: SavedInvitation, organiser: PeerId) -> str:
    before = fingerprint(saved.organiser) if saved.organiser else "none"
    return (
        f"the run is signed by another key ({fingerprint(organiser)}) than before ({before}): "
        f"ask the organiser; if the new key is right, remove {saved.path}"
    )
