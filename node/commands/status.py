"""`murmur status` and `murmur key`: the status and the peer ids of the nodes on this machine."""

import asyncio
import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from node.monitoring.logs import sanitize
from node.monitoring.status import NodeStatus, fetch_status
from node.paths import find_node_dirs, read_metrics_port, read_peer_id, running_dirs
from node.run_dir import FINAL_STATUS, is_locked
from protocol.errors import StorageError, UnreachableError, UsageError
from protocol.identity import Identity

STATUS_SECONDS = 5.0
MANIFEST_FILE = "run.toml"


def status_lines(path: Path | None, as_json: bool, check: bool = False) -> list[str]:
    """Return a line for each node, followed by its counted reasons, or one JSON object.

    Without a `path`, the nodes are all running ones of this user, or the last one if none runs. The JSON object maps
    node folders to status; that of a node that does not run has `stopped`, its line of text, and `last`, the status
    with which it ended, `null` if there is none. Raises UnreachableError if `check` is set and no node runs.
    """
    folders = find_node_dirs(path) if path else running_dirs() or find_node_dirs(None)
    statuses = asyncio.run(_fetch_statuses(folders))
    if check and not any(statuses):
        raise UnreachableError(f"no node answers: {folders[0].name} {_describe_stopped(folders[0])}")
    if as_json:
        shown = {
            str(folder): status.model_dump(mode="json") if status else _stopped_values(folder)
            for folder, status in zip(folders, statuses, strict=True)
        }
        return [json.dumps(shown)]
    nodes = zip(folders, statuses, strict=True)
    title = "" if path or any(statuses) or any(map(is_locked, folders)) else "no node runs now; the last one: "
    label = _name if path else _shorten
    return [
        sanitize(f"{title}{line}") for folder, status in nodes for line in _node_lines(folder, label(folder), status)
    ]


def _name(folder: Path) -> str:
    return folder.name


def _shorten(folder: Path) -> str:
    """Return the folder as a person would type it here."""
    with contextlib.suppress(ValueError):
        return str(folder.relative_to(Path.cwd()))
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{folder.relative_to(Path.home())}"
    return str(folder)


def _node_lines(folder: Path, label: str, status: NodeStatus | None) -> list[str]:
    if status is None:
        return [f"{label}: {_describe_stopped(folder)}"]
    trust = [f"    trust point {status.trust}"] if status.trust else []
    return [f"{label}: {status.summary()}", *(f"    {reason}" for reason in status.reason_lines()), *trust]


def key_line(folder: Path, create: bool = False) -> str:
    """Return the peer id of the node in `folder`; `create` makes its key if there is none.

    Raises UsageError for the folder of a swarm, and without `create` for another folder, such as a mistyped one.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a directory; name a node's folder")
    peers = sorted(folder.glob("peer-*"))
    if peers and not (folder / "key").exists():
        raise UsageError(f"{folder} is the folder of a whole swarm; name one of its peers, such as {peers[0]}")
    if not create and not (folder / "key").exists():
        raise UsageError(f"no node has run in {folder}; correct the folder, or make a key for a new node with --create")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"cannot use the folder {folder}: {error.strerror}; name a node's folder") from error
    return Identity.load_or_create(folder / "key").peer_id


async def _fetch_statuses(folders: list[Path]) -> list[NodeStatus | None]:
    return await asyncio.gather(*(_fetch_one_status(folder) for folder in folders))


async def _fetch_one_status(folder: Path) -> NodeStatus | None:
    port = read_metrics_port(folder)
    if port is None:
        return None
    try:
        status = await fetch_status(port, STATUS_SECONDS)
    except UnreachableError:
        return None
    # Another node may use the port of a node that has ended.
    return status if status.peer_id == read_peer_id(folder) else None


def _last_status(folder: Path) -> NodeStatus | None:
    """Return the status with which a node ended."""
    try:
        return NodeStatus.model_validate_json((folder / FINAL_STATUS).read_bytes())
    except (OSError, ValidationError):
        return None


def _stopped_values(folder: Path) -> dict[str, Any]:
    last = None if is_locked(folder) else _last_status(folder)
    return {"stopped": _describe_stopped(folder), "last": last and last.model_dump(mode="json")}


def _describe_stopped(folder: Path) -> str:
    if is_locked(folder):
        return "is starting, or does not answer"
    last = _last_status(folder)
    if last is None:
        return f"does not run; start it with {_start_command(folder)}"
    if last.is_done:
        return f"does not run; when it ended: {last.describe_round()}, step {last.step}, the target was reached"
    if last.phase == "watching":
        command = f"`murmur host {shlex.quote(str(folder / MANIFEST_FILE))} --dir {shlex.quote(str(folder))}`"
        return f"does not run; when it ended: {last.describe_round()}; start it with {command}"
    ended = f"{last.phase}: {last.reason}" if last.reason else last.phase
    ended = f"does not run; when it ended: {last.describe_round()}, step {last.step}, {ended}"
    return f"{ended}; resume it with {_start_command(folder)}"


def _start_command(folder: Path) -> str:
    """Return the command that starts the node of a folder again."""
    swarm = folder.parent
    if folder.name.startswith("peer-") and (swarm / MANIFEST_FILE).exists():
        return f"`murmur up --dir {shlex.quote(str(swarm))}`"
    return f"`murmur join {shlex.quote(str(folder))}`" if (folder / MANIFEST_FILE).exists() else "`murmur join RUN`"
