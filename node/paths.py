"""The places of runs on this machine.

runs/NAME-1/             a swarm of `murmur up`: run.toml, report.json, report.md, export/ and one node folder per peer
runs/NAME-1/peer-0/      a node's folder, as node.run_dir describes it
~/.local/state/murmur/   a folder NAME-RUNID for each joined run (or below $XDG_STATE_HOME),
                         hosts/NAME-RUNID for each hosted run, and organiser.key, the user's key as an organiser
~/.local/state/murmur/running/   a file for each node that runs, with the path of its folder, wherever that is

The file of a node that was killed stays until `murmur status` removes it. A machine where the file cannot be written
runs nodes all the same.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from node.run_dir import STAGE, is_locked, read_json_if_whole
from protocol.errors import CheckpointError, MissingFileError, StorageError, UsageError
from protocol.files import write_atomically
from protocol.manifest.run import Manifest

logger = logging.getLogger(__name__)

SWARMS_DIR = Path("runs")
KEEP_MARK = ".keep"  # the suffix of a file that protects a checkpoint, see node.daemon.checkpoints.checkpoint
IN_WHEEL, IN_SOURCE = Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs"
DEMO_MANIFEST = (IN_WHEEL if IN_WHEEL.is_dir() else IN_SOURCE) / "demo.toml"
BOOTSTRAP_FILE = Path(__file__).with_name("bootstrap.toml")


def bootstrap_file() -> Path:
    """Return the file with the public peers that come with the program."""
    return BOOTSTRAP_FILE


def state_home() -> Path:
    """Return the folder of the joined runs. Raises UsageError if this user has no home directory."""
    if given := os.environ.get("XDG_STATE_HOME"):
        return Path(given) / "murmur"
    try:
        return Path.home() / ".local" / "state" / "murmur"
    except RuntimeError as error:  # HOME is unset, and the user id has no entry in passwd
        raise UsageError("this user has no home directory; set HOME or XDG_STATE_HOME, or name the --dir") from error


def is_utf8(path: Path) -> bool:
    """Return whether a path can be written into a manifest or sent to a trainer."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def joined_dirs() -> list[Path]:
    """Return the folders of the joined runs, and `hosts`; none for a user without a home directory."""
    try:
        return sorted(state_home().glob("*/"))
    except UsageError:
        return []


def organiser_key_path() -> Path:
    """Return the file with the key that signs what this user decides as the organiser of runs."""
    return state_home() / "organiser.key"


def join_dir(manifest: Manifest) -> Path:
    """Return the default folder of a node of this run; it is the same at every start, so that a node resumes."""
    return state_home() / f"{manifest.run.name}-{manifest.run_id[:8]}"


def host_dir(manifest: Manifest) -> Path:
    """Return the default folder of a host of this run.

    It differs from that of a joined node, because two processes must not share a folder or a key.
    """
    return state_home() / "hosts" / join_dir(manifest).name


def next_swarm_dir(name: str) -> Path:
    """Return the first of runs/NAME-1, runs/NAME-2, ... that does not exist."""
    number = 1
    while (SWARMS_DIR / f"{name}-{number}").exists():
        number += 1
    return SWARMS_DIR / f"{name}-{number}"


def demo_manifest() -> Path:
    """Return the manifest of the demo. Raises MissingFileError if it is not installed."""
    if not DEMO_MANIFEST.exists():
        raise MissingFileError(
            f"the manifest of the demo is not installed ({DEMO_MANIFEST}); name a manifest: murmur up RUN.toml"
        )
    return DEMO_MANIFEST


def peer_dir(swarm: Path, index: int) -> Path:
    return swarm / f"peer-{index}"


def find_node_dirs(path: Path | None) -> list[Path]:
    """Return the node folders at or directly below `path`; without a path, those of the newest run."""
    if path is not None:
        _require_dir(path)
        found = [path] if _is_node_dir(path) else [folder for folder in sorted(path.iterdir()) if _is_node_dir(folder)]
        if not found:
            raise UsageError(f"no node has run in {path}; name the --dir of a node, or the folder of a `murmur up`")
        return found
    own = [file for folder in joined_dirs() for file in (*folder.glob("node.json"), *folder.glob("*/node.json"))]
    node_files = [*own, *SWARMS_DIR.glob("*/peer-*/node.json")]
    if not node_files:
        raise UsageError("no node has run here yet; start one with `murmur join RUN`, or name its --dir")
    newest = max(node_files, key=lambda file: file.stat().st_mtime).parent
    return find_node_dirs(newest.parent) if newest.parent.parent == SWARMS_DIR else [newest]


def find_trained_dir(path: Path) -> Path:
    """Return `path` if it is a node's folder, otherwise the node folder below it with the newest checkpoint."""
    _require_dir(path)
    if (path / "checkpoints").is_dir():
        return path
    if stage_checkpoints(path):
        return path  # its nodes have the whole model together
    nodes = {folder: find_newest_checkpoint(folder) for folder in sorted(path.glob("peer-*"))}
    rounds = {folder: _round_of(saved) for folder, saved in nodes.items() if saved}
    if not rounds:
        raise CheckpointError(
            f"no checkpoint in {path}; name the --dir of a node that has finished a round, or wait until this one has"
        )
    return max(rounds, key=lambda folder: rounds[folder])


def find_newest_checkpoint(node_dir: Path) -> Path | None:
    """Return the newest checkpoint by its name (NUMBER.round-ROUND, see node.daemon.checkpoints.checkpoint)."""
    return max(_saved_in(node_dir), default=None)


def _saved_in(node_dir: Path) -> list[Path]:
    """Return the checkpoints in a node's folder, without the marks that protect some of them."""
    return [path for path in (node_dir / "checkpoints").glob("[0-9]*.round-*") if path.suffix != KEEP_MARK]


def find_newest_model(folders: Sequence[Path]) -> tuple[int, Path] | None:
    """Return the round and the folder of the newest whole model; None if there is none."""
    newest = ((folder, newest_checkpoints(folder)) for folder in folders)
    return max(((_round_of(saved[0]), folder) for folder, saved in newest if saved), default=None)


def newest_checkpoints(folder: Path) -> tuple[Path, ...]:
    """Return the checkpoints that make up the newest model in a folder: one, or one of each stage of a pipeline."""
    held = stage_checkpoints(folder)
    if not held:
        saved = find_newest_checkpoint(folder)
        return (saved,) if saved else ()
    common = set.intersection(*(set(rounds) for rounds in held.values()))
    return tuple(held[stage][max(common)] for stage in sorted(held)) if common else ()


def stage_checkpoints(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the checkpoints of all stages of a pipeline by stage and round.

    They are in the folder of a node, in the folders in it of stages that the node keeps, and in those of several nodes
    directly below `folder`. Empty if none of these is of a pipeline.
    """
    found: dict[int, dict[int, Path]] = {}
    for node in (folder, *folder.glob("*/"), *folder.glob("*/stage-*/")):
        noted = read_json_if_whole(node / STAGE) if (node / "checkpoints").is_dir() else {}
        stage, stages = noted.get("stage"), noted.get("stages")
        if isinstance(stage, int) and isinstance(stages, int):
            found = found or {number: {} for number in range(stages)}
            found.setdefault(stage, {}).update({_round_of(path): path for path in _saved_in(node)})
    return found


def _round_of(checkpoint: Path) -> int:
    """Return the round of a checkpoint by its name."""
    return int(checkpoint.name.rpartition("-")[2])


def kept_stage_dir(node_dir: Path, stage: int) -> Path:
    """Return the folder in a node's folder for the kept state of a stage that the node does not train."""
    return node_dir / f"stage-{stage}"


def kept_stages_in(node_dir: Path) -> list[int]:
    """Return the stages that have such a folder."""
    numbers = (folder.name.removeprefix("stage-") for folder in node_dir.glob("stage-*/"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_metrics_port(node_dir: Path) -> int | None:
    """Return the metrics port of the node that runs (or last ran) in `node_dir`."""
    port = read_json_if_whole(node_dir / "node.json").get("metrics_port")
    return port if isinstance(port, int) else None


def read_peer_id(node_dir: Path) -> str | None:
    """Return the peer id of the node that runs (or last ran) in `node_dir`."""
    peer = read_json_if_whole(node_dir / "node.json").get("peer_id")
    return peer if isinstance(peer, str) else None


def _require_dir(path: Path) -> None:
    if not path.is_dir():
        raise MissingFileError(f"{path} is not a directory; name the --dir of `murmur join` or `murmur up`")


def _is_node_dir(folder: Path) -> bool:
    return (folder / "key").exists() or (folder / "node.json").exists()


@contextlib.contextmanager
def registered(folder: Path) -> Iterator[None]:
    """Keep a node's folder in the registry while the node runs."""
    try:
        entry = _entry_of(folder.resolve())
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_vanished(entry.parent)
        write_atomically(entry, os.fsencode(folder.resolve()))
    except (OSError, StorageError, UsageError) as error:
        logger.debug("`murmur status` will need the folder of this node, because it cannot be noted: %s", error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            entry.unlink(missing_ok=True)


def running_dirs() -> list[Path]:
    """Return the folders of the nodes that run, and remove the entries of those that no longer do."""
    try:
        entries = sorted((state_home() / "running").glob("[!.]*"))
    except (OSError, UsageError):
        return []
    found = []
    for entry in entries:
        with contextlib.suppress(OSError):
            folder = Path(os.fsdecode(entry.read_bytes()))
            if is_locked(folder):
                found.append(folder)
            else:
                entry.unlink(missing_ok=True)
    return sorted(found)


def _remove_vanished(registry: Path) -> None:
    """Remove the entries of folders that no longer exist, so that killed nodes do not fill the registry."""
    for entry in registry.glob("[!.]*"):
        with contextlib.suppress(OSError):
            if not Path(os.fsdecode(entry.read_bytes())).exists():
                entry.unlink(missing_ok=True)


def _entry_of(folder: Path) -> Path:
    return state_home() / "running" / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
