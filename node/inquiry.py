"""Questions about the nodes of this machine: what do they do, who are they."""

import asyncio
import json
from pathlib import Path

from pydantic import ValidationError

from node.folder import LAST_WORD, is_claimed
from node.harmless import harmless
from node.places import announced_peer, announced_port, node_folders
from node.status import NodeStatus, fetch_status
from protocol.errors import StorageError, UnreachableError, UsageError
from protocol.identity import Identity

STATUS_DEADLINE = 5.0


def status_lines(path: Path | None, as_json: bool, check: bool = False) -> list[str]:
    """A line for each node, and below it the reasons that it counted; or one JSON object: node folder to status, null
    for a node that does not run.

    UnreachableError where `check` is asked for and none of them runs.
    """
    folders = node_folders(path)
    statuses = asyncio.run(_ask(folders))
    if check and not any(statuses):
        raise UnreachableError(f"no node answers: {folders[0].name} {_absent(folders[0])}")
    if as_json:
        shown = {
            str(folder): status.model_dump(mode="json") if status else None
            for folder, status in zip(folders, statuses, strict=True)
        }
        return [json.dumps(shown)]
    return [harmless(line) for told in zip(folders, statuses, strict=True) for line in _lines(*told)]


def _lines(folder: Path, status: NodeStatus | None) -> list[str]:
    if status is None:
        return [f"{folder.name}: {_absent(folder)}"]
    return [f"{folder.name}: {status.summary()}", *(f"    {reason}" for reason in status.reasons())]


def key_line(folder: Path) -> str:
    """The peer id of the node in that folder; its key is made if there is none."""
    peers = sorted(folder.glob("peer-*"))
    if peers and not (folder / "key").exists():
        raise UsageError(f"{folder} is the folder of a whole swarm; name one of its peers, such as {peers[0]}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"cannot use the folder {folder}: {error.strerror}; name a node's folder") from error
    return Identity.load_or_create(folder / "key").peer_id


async def _ask(folders: list[Path]) -> list[NodeStatus | None]:
    return await asyncio.gather(*(_ask_one(folder) for folder in folders))


async def _ask_one(folder: Path) -> NodeStatus | None:
    port = announced_port(folder)
    if port is None:
        return None
    try:
        status = await fetch_status(port, STATUS_DEADLINE)
    except UnreachableError:
        return None
    # The port of a node that has ended may be another one's by now.
    return status if status.peer_id == announced_peer(folder) else None


def _absent(folder: Path) -> str:
    if is_claimed(folder):
        return "is starting, or does not answer"
    try:
        last = NodeStatus.model_validate_json((folder / LAST_WORD).read_bytes())
    except (OSError, ValidationError):
        return "does not run; start it with `murmur join`"
    if last.phase == "watching":
        return f"does not run; when it ended: {last.round_of_target()}; start it with `murmur host`"
    ended = f"{last.phase}: {last.reason}" if last.reason else last.phase
    return f"does not run; when it ended: {last.round_of_target()}, step {last.step}, {ended}"
