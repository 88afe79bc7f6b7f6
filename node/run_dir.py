"""A node's own folder: who holds it, which run it belongs to, and what the next start should remember.

    key            the identity              run.toml      the run it belongs to
    lock           held while a node runs    node.json     process, addresses and metrics port of the running node
    checkpoints/   saved states              peers.json    addresses that worked, for a start without a bootstrap peer
    blobs/         content-addressed files   status.json   the last status of a node that has ended
    tokenizer.json the run's, if it has one  vow.json      what it promised the others in the open round
    offer.json     the last message of its trainer that others may have

A node whose port is left to chance takes that of its last start, so that the links which others have stay true.
"""

import fcntl
import json
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from protocol.errors import AlreadyRunningError, OtherRunError, PortTakenError, StorageError
from protocol.manifest import Manifest, load_manifest
from protocol.transport.local_sockets import retry_while_port_taken

TOKENIZER = "tokenizer.json"
FINAL_STATUS = "status.json"


class RunDir:
    """Claim it before touching anything inside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.peers = path / "peers.json"
        self.key = path / "key"
        self.vote_log = path / "vow.json"
        self.contribution_file = path / "offer.json"
        self.blobs = path / "blobs"
        self.checkpoints = path / "checkpoints"

    @contextmanager
    def lock(self, manifest: Manifest) -> Iterator[Self]:
        """No other process has it while inside. Raises AlreadyRunningError, OtherRunError or StorageError."""
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._require_same_run(manifest)
                (self.path / FINAL_STATUS).unlink(missing_ok=True)  # from now on it would tell of an earlier life
            except BlockingIOError as error:
                raise AlreadyRunningError(
                    f"another node runs in {self.path}; stop it first, or give this one its own --dir"
                ) from error
            except OSError as error:
                raise StorageError(
                    f"cannot use the folder {self.path}: {error.strerror}; choose another --dir"
                ) from error
            yield self

    def copy_tokenizer(self, manifest: Manifest, base: Path) -> None:
        """A copy of the run's tokenizer, for `murmur export` and `murmur generate`, which know only this folder.

        `base`: the folder that the manifest's paths start from. A tokenizer that is missing is the trainer's to report.
        """
        source = base / manifest.data.tokenizer
        if manifest.data.tokenizer and source.is_file():
            write_atomically(self.path / TOKENIZER, source.read_bytes())

    def write_node_info(self, peer_id: str, addresses: tuple[str, ...], metrics_port: int) -> None:
        """Say where the running node is found, for `murmur status` and `murmur up`."""
        values = {"pid": os.getpid(), "peer_id": peer_id, "addresses": addresses, "metrics_port": metrics_port}
        write_atomically(self.path / "node.json", json.dumps(values).encode())

    def write_final_status(self, status: str) -> None:
        """The last status, as JSON, for whoever asks after the node has ended."""
        write_atomically(self.path / FINAL_STATUS, status.encode())

    def read_last_port(self) -> int:
        """The TCP port of the last start, so that the addresses others remember stay true; 0: none yet."""
        addresses = read_json_if_whole(self.path / "node.json").get("addresses", ())
        found = (re.search(r"/tcp/(\d{1,5})\b", str(address)) for address in addresses)
        return next((int(match[1]) for match in found if match), 0)

    def _require_same_run(self, manifest: Manifest) -> None:
        path = self.path / "run.toml"
        if path.exists():
            present = load_manifest(path)
            if present.run_id != manifest.run_id:
                raise OtherRunError(
                    f"{self.path} belongs to the run {present.run.name} ({present.run_id[:12]}), "
                    f"not to {manifest.run.name} ({manifest.run_id[:12]}); choose another --dir"
                )
        else:
            write_atomically(path, manifest.to_toml().encode())


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """What an earlier start has left there; a torn or absent file only means that nothing is remembered."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def is_locked(path: Path) -> bool:
    """Whether a node holds the folder. Its lock is tried and let go at once: ask only where no node answers."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def tokenizer_path(run_dir: Path, manifest: Manifest) -> Path:
    """Where the tokenizer of a run is found from a node's folder; only for runs that have one."""
    kept = run_dir / TOKENIZER
    return kept if kept.exists() else run_dir / manifest.data.tokenizer


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old content or the new, never a part, also after a power cut. Raises StorageError."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; free some space or choose another --dir") from error


logger = logging.getLogger(__name__)


async def reuse_last_port(run_dir: RunDir, listen: Sequence[str]) -> tuple[str, ...]:
    """A port left to chance is the one of the last start, where that can still be had: links stay true."""
    port = run_dir.read_last_port()
    usual = tuple(address.replace("/tcp/0", f"/tcp/{port}") for address in listen)
    if not port or usual == tuple(listen):
        return tuple(listen)

    async def claim() -> None:
        if not is_port_free(port):
            raise PortTakenError(f"another program has port {port}, which was ours")

    try:
        await retry_while_port_taken(claim)
    except PortTakenError as error:
        logger.warning("%s; taking another: links to this node change", error)
        return tuple(listen)
    return usual


def is_port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
