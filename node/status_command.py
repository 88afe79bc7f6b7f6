"""`murmur status` and `murmur key`: the status and the peer ids of the nodes on this machine."""

import asyncio
import json
from pathlib import Path

from pydantic import ValidationError

from node.monitoring.logs import sanitize
from node.monitoring.status import NodeStatus, fetch_status
from node.paths import find_node_dirs, read_metrics_port, read_peer_id
from node.run_dir import FINAL_STATUS, is_locked
from protocol.errors import StorageError, UnreachableError, UsageError
from protocol.identity import Identity

STATUS_SECONDS = 5.0


def status_lines(path: Path | None, as_json: bool, check: bool = False) -> list[str]:
    """Return a line for each node, followed by its counted reasons, or one JSON object.

    The JSON object maps node folders to status, `null` for a node that does not run. Raises UnreachableError if `check`
    is set and no node runs.
    """
    folders = find_node_dirs(path)
    statuses = asyncio.run(_fetch_statuses(folders))
    if check and not any(statuses):
        raise UnreachableError(f"no node answers: {folders[0].name} {_describe_stopped(folders[0])}")
    if as_json:
        shown = {
            str(folder): status.model_dump(mode="json") if status else None
            for folder, status in zip(folders, statuses, strict=True)
        }
        return [json.dumps(shown)]
    nodes = zip(folders, statuses, strict=True)
    return [sanitize(line) for folder, status in nodes for line in _node_lines(folder, status)]


def _node_lines(folder: Path, status: NodeStatus | None) -> list[str]:
    if status is None:
        return [f"{folder.name}: {_describe_stopped(folder)}"]
    return [f"{folder.name}: {status.summary()}", *(f"    {reason}" for reason in status.reason_lines())]


def key_line(folder: Path) -> str:
    """Return the peer id of the node in `folder`; creates its key if there is none."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a directory; name a node's folder")
    peers = sorted(folder.glob("peer-*"))
    if peers and not (folder / "key").exists():
        raise UsageError(f"{folder} is the folder of a whole swarm; name one of its peers, such as {peers[0]}")
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


def _describe_stopped(folder: Path) -> str:
    if is_locked(folder):
        return "is starting, or does not answer"
    try:
        last = NodeStatus.model_validate_json((folder / FINAL_STATUS).read_bytes())
    except (OSError, ValidationError):
        return "does not run; start it with `murmur join`"
    if last.phase == "watching":
        return f"does not run; when it ended: {last.describe_round()}; start it with `murmur host`"
    ended = f"{last.phase}: {last.reason}" if last.reason else last.phase
    return f"does not run; when it ended: {last.describe_round()}, step {last.step}, {ended}"
