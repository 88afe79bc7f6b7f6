"""Where runs lie on this machine.

    runs/NAME-1/             a swarm of `murmur up`: run.toml, report.json, export/ and one node folder a peer
    runs/NAME-1/peer-0/      a node's folder, as node.folder describes it
    ~/.local/state/murmur/   a folder for each run that was joined: NAME-RUNID (or below $XDG_STATE_HOME),
                             and hosts/NAME-RUNID for each that was hosted
"""

import os
from pathlib import Path

from node.folder import left_behind
from protocol.errors import CheckpointError, MissingFileError, UsageError
from protocol.manifest import Manifest

SWARMS = Path("runs")
DEMO = Path(__file__).parent.parent / "configs" / "demo.toml"
BOOTSTRAP = Path(__file__).with_name("bootstrap.toml")


def bootstrap_list() -> Path:
    """The public peers that come with the program."""
    return BOOTSTRAP


def joined_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "murmur"


def joined_folder(manifest: Manifest) -> Path:
    """The same for every start, so that joining again resumes."""
    return joined_home() / f"{manifest.run.name}-{manifest.run_id[:8]}"


def hosted_folder(manifest: Manifest) -> Path:
    """Apart from that of a node of the same run on this machine: two processes never share a folder or a key."""
    return joined_home() / "hosts" / joined_folder(manifest).name


def fresh_swarm(name: str) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist."""
    number = 1
    while (SWARMS / f"{name}-{number}").exists():
        number += 1
    return SWARMS / f"{name}-{number}"


def demo_manifest() -> Path:
    if not DEMO.exists():
        raise MissingFileError(f"the demo's manifest is not installed ({DEMO}); name a manifest: murmur up RUN.toml")
    return DEMO


def peer_folder(swarm: Path, index: int) -> Path:
    return swarm / f"peer-{index}"


def node_folders(path: Path | None) -> list[Path]:
    """The node folders at or right below `path`; without a path, those of the run that was started last."""
    if path is not None:
        _require_folder(path)
        found = [path] if _is_node(path) else [folder for folder in sorted(path.iterdir()) if _is_node(folder)]
        if not found:
            raise UsageError(f"no node has run in {path}; name the --dir of a node, or the folder of a `murmur up`")
        return found
    joined, hosted = joined_home().glob("*/node.json"), joined_home().glob("hosts/*/node.json")
    places = [*joined, *hosted, *SWARMS.glob("*/peer-*/node.json")]
    if not places:
        raise UsageError("no node has run here yet; start one with `murmur join RUN`, or name its --dir")
    newest = max(places, key=lambda place: place.stat().st_mtime).parent
    return node_folders(newest.parent) if newest.parent.parent == SWARMS else [newest]


def trained_folder(path: Path) -> Path:
    """`path` if it is a node's, else the node folder below it whose newest checkpoint is of the latest round."""
    _require_folder(path)
    if (path / "checkpoints").is_dir():
        return path
    nodes = {folder: newest_checkpoint(folder) for folder in sorted(path.glob("peer-*"))}
    rounds = {folder: int(saved.name.rpartition("-")[2]) for folder, saved in nodes.items() if saved}
    if not rounds:
        raise CheckpointError(f"no checkpoint in {path}; name the --dir of `murmur join` or `murmur up`")
    return max(rounds, key=lambda folder: rounds[folder])


def newest_checkpoint(node: Path) -> Path | None:
    """By name alone (NUMBER.round-ROUND), as node.checkpoints.checkpoint writes them."""
    return max((node / "checkpoints").glob("[0-9]*.round-*"), default=None)


def announced_port(folder: Path) -> int | None:
    """The metrics port of the node that runs (or ran last) in `folder`."""
    port = left_behind(folder / "node.json").get("metrics_port")
    return port if isinstance(port, int) else None


def announced_peer(folder: Path) -> str | None:
    """Who runs (or ran last) in `folder`."""
    peer = left_behind(folder / "node.json").get("peer_id")
    return peer if isinstance(peer, str) else None


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        raise MissingFileError(f"{path} is no folder; name the --dir of `murmur join` or `murmur up`")


def _is_node(folder: Path) -> bool:
    return (folder / "key").exists() or (folder / "node.json").exists()
