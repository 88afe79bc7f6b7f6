"""Manage a node's own folder: its lock, its run, and the files that the next start reads.

    key            the identity              run.toml      the run it belongs to
    lock           held while a node runs    node.json     process id, addresses and metrics port of the running node
    checkpoints/   saved states              peers.json    addresses that worked, to start without a bootstrap peer
    blobs/         content-addressed files   status.json   the last status of a node that has exited
    tokenizer.json the run's, if it has one  vow.json      its vote in the open round (node.daemon.checkpoints.vote_log)
    offer.json     the last contribution of its trainer that other peers may have
    evaluations.jsonl   results of `murmur eval` (node.commands.eval.results)
    metrics.jsonl  its metrics over time (node.monitoring.training_log), and tensorboard/ or wandb/ next to it
    commits.log    the signed commits of the run (node.daemon.receipts.commit_file)
    revisions.json the organiser's revisions of the manifest
    site-key       the key behind the token of its site (node.trainer.site)
    ticket         the organiser's permission to take part (node.own_ticket)
    voucher        the organiser's word for this node as a host (node.own_voucher)
    place          tells a folder that was copied or restored from the one that wrote it
    proofs         the misdeeds of other keys, which are excluded for this run (node.daemon.checkpoints.vote_log)
    convictions.json  the keys that audits excluded, with the signed findings of two thirds of the voters
    contradictions.json  the keys that audits of a pipeline excluded, with the signed results

A node without a fixed port reuses the port of its last start, so that addresses known to other peers stay valid.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from protocol.errors import AlreadyRunningError, DataError, OtherRunError, PortTakenError, StorageError
from protocol.files import write_atomically as write_atomically
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest, changed_keys
from protocol.steering import steerable_keys
from protocol.transport.local_sockets import retry_while_port_taken
from protocol.transport.nat import find_common_port, is_port_free

logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
FINAL_STATUS = "status.json"
STAGE = "stage.json"
MAX_SHOWN_CHANGES = 5


class RunDir:
    """The paths of a node's folder. Take `lock` before any access to the files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.peers = path / "peers.json"
        self.key = path / "key"
        self.site_key = path / "site-key"
        self.vote_log = path / "vow.json"
        self.contribution_file = path / "offer.json"
        self.revisions = path / "revisions.json"
        self.ticket = path / "ticket"
        self.voucher = path / "voucher"
        self.proofs = path / "proofs"
        self.convictions = path / "convictions.json"
        self.contradictions = path / "contradictions.json"
        self.place = path / "place"
        self.blobs = path / "blobs"
        self.activations = path / "activations"
        self.checkpoints = path / "checkpoints"

    @contextmanager
    def lock(self, manifest: Manifest) -> Iterator[Self]:
        """Lock the folder for this process and this run.

        Raises:
            AlreadyRunningError: Another node runs in it.
            OtherRunError: It belongs to another run.
            StorageError: It cannot be created or written.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._require_same_run(manifest)
                (self.path / FINAL_STATUS).unlink(missing_ok=True)  # it describes an earlier process
            except BlockingIOError as error:
                raise AlreadyRunningError(
                    f"another node runs in {self.path}; stop it first, or give this one its own --dir"
                ) from error
            except OSError as error:
                raise StorageError(
                    f"cannot use the folder {self.path}: {error.strerror}; choose another --dir"
                ) from error
            yield self

    def was_copied(self) -> bool:
        """Return whether the folder was copied, or restored from a backup, since the last call, and remember its place.

        A copy of the key has another time of change, which no program that copies files can set. A folder without the
        mark is new. Raises StorageError.
        """
        try:
            now = str(self.key.stat().st_ctime_ns)
            before = self.place.read_text() if self.place.exists() else ""
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}; fix its permissions") from error
        if before != now:
            write_atomically(self.place, now.encode())
        return before not in ("", now)

    def copy_tokenizer(self, manifest: Manifest, base: Path) -> None:
        """Copy the run's tokenizer, because `murmur export` and `murmur generate` know only this folder.

        The trainer reports a tokenizer that cannot be read. `base` is the folder that the manifest's paths start from.

        Raises:
            DataError: The file is another one than the node has trained with, so the same ids would be other text.
        """
        if not manifest.data.tokenizer:
            return
        source, copy = base / manifest.data.tokenizer, self.path / TOKENIZER
        try:
            data = source.read_bytes()
        except OSError:
            return
        if any(self.checkpoints.glob("*.round-*")) and copy.exists() and copy.read_bytes() != data:
            raise DataError(f"{source} is not the tokenizer that this node has trained with; restore it from {copy}")
        write_atomically(copy, data)

    def write_node_info(self, peer_id: str, addresses: tuple[str, ...], metrics_port: int) -> None:
        """Write where the running node can be reached, for `murmur status` and `murmur up`."""
        values = {"pid": os.getpid(), "peer_id": peer_id, "addresses": addresses, "metrics_port": metrics_port}
        write_atomically(self.path / "node.json", json.dumps(values).encode())

    def write_final_status(self, status: str) -> None:
        """Write the last status, as JSON, for `murmur status` after the node has exited."""
        write_atomically(self.path / FINAL_STATUS, status.encode())

    def read_stage(self) -> int | None:
        """Return the stage of a pipeline that this folder holds; None if it holds none yet."""
        stage = read_json_if_whole(self.path / STAGE).get("stage")
        return stage if isinstance(stage, int) else None

    def write_stage(self, stage: int, stages: int) -> None:
        """Note the stage that this folder holds, and how many the run has."""
        write_atomically(self.path / STAGE, json.dumps({"stage": stage, "stages": stages}).encode())

    def read_last_port(self) -> int:
        """Return the TCP port of the last start, 0 if there was none."""
        addresses = read_json_if_whole(self.path / "node.json").get("addresses", ())
        matches = (re.search(r"/tcp/(\d{1,5})\b", str(address)) for address in addresses)
        return next((int(match[1]) for match in matches if match), 0)

    def _require_same_run(self, manifest: Manifest) -> None:
        path = self.path / "run.toml"
        if path.exists():
            present = load_manifest(path)
            if present.run_id != manifest.run_id:
                raise OtherRunError(_describe_other_run(self.path, present, manifest))
        else:
            write_atomically(path, manifest.to_toml().encode())


def _describe_other_run(folder: Path, present: Manifest, wanted: Manifest) -> str:
    changed = changed_keys(present, wanted)
    shown = ", ".join(changed[:MAX_SHOWN_CHANGES])
    more = f" and {len(changed) - MAX_SHOWN_CHANGES} more" if len(changed) > MAX_SHOWN_CHANGES else ""
    return (
        f"{folder} belongs to the run {present.run.name} ({present.run_id[:12]}), not to {wanted.run.name} "
        f"({wanted.run_id[:12]}); different: {shown}{more}; "
        + "; ".join(
            filter(None, (_how_to_steer(present, changed), _how_to_continue(folder), "or choose another --dir"))
        )
    )


def _how_to_steer(present: Manifest, changed: Sequence[str]) -> str:
    """Return the way to change these keys of the run that goes on, if there is one."""
    keys = {change.partition(" ")[0] for change in changed}
    can_steer = present.run.organiser_key and keys <= set(steerable_keys())
    return "its organiser can change that while it runs (`murmur steer`)" if can_steer else ""


def _how_to_continue(folder: Path) -> str:
    if (folder / "events.jsonl").exists():  # of a host, which takes the manifest that it is given
        return ""
    command = "join" if (folder / "key").exists() else "up --dir"
    return f"continue the old run with `murmur {command} {folder}`"


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or damaged."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def is_locked(path: Path) -> bool:
    """Return whether a node holds the folder's lock.

    This takes the lock for an instant, so call it only if no node answers.
    """
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
    """Return the path of the tokenizer of a run that has one: the copy in the folder, else the original."""
    copy = run_dir / TOKENIZER
    return copy if copy.exists() else run_dir / manifest.data.tokenizer


async def reuse_last_port(run_dir: RunDir, listen: Sequence[str]) -> tuple[str, ...]:
    """Replace port 0 in the listen addresses by the port of the last start, if that is free.

    At the first start, addresses of IPv4 and IPv6 get one port: a router or firewall has to open only that one.
    """
    port, families = run_dir.read_last_port(), _families_with_any_port(listen)
    if not families:
        return tuple(listen)
    if not port:
        port = find_common_port() if len(families) > 1 else 0
        return _with_port(listen, port)

    async def claim() -> None:
        if not all(is_port_free(port, family) for family in families):
            raise PortTakenError(f"another program uses port {port}, which this node used before")

    try:
        await retry_while_port_taken(claim)
    except PortTakenError as error:
        logger.warning("%s; using another port: the address of this node changes", error)
        return _with_port(listen, find_common_port() if len(families) > 1 else 0)
    return _with_port(listen, port)


def _families_with_any_port(listen: Sequence[str]) -> set[socket.AddressFamily]:
    return {
        socket.AF_INET6 if address.startswith("/ip6/") else socket.AF_INET
        for address in listen
        if address.endswith("/tcp/0") or "/tcp/0/" in address
    }


def _with_port(listen: Sequence[str], port: int) -> tuple[str, ...]:
    return tuple(re.sub(r"/tcp/0(?=/|$)", f"/tcp/{port}", address) for address in listen)


def append_bounded(path: Path, text: str, max_bytes: int) -> None:
    """Add text to a file, in one write; one that is too long becomes NAME.1.SUFFIX first. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size >= max_bytes:
            os.replace(path, older_file(path))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def older_file(path: Path) -> Path:
    """Return the place of the lines that were in the file before it became too long."""
    return path.with_suffix(f".1{path.suffix}")
