"""`murmur rollback`: list the checkpoints of a node that is stopped, and make an earlier one the newest."""

import shutil
from pathlib import Path

from node.daemon.checkpoints.checkpoint_folders import SavedCheckpoint, list_checkpoints
from node.run_dir import RunDir
from protocol.errors import MissingFileError, StorageError, UsageError
from protocol.manifest.reading import load_manifest

SET_ASIDE_FOLDER = "rolled-back"


def roll_back(folder: Path, round_number: int | None) -> list[str]:
    """List the checkpoints, or return to that of a round; returns the lines to print. Raises MurmurError."""
    run_dir = RunDir(folder)
    saved = list_checkpoints(run_dir.checkpoints)
    if not saved:
        raise MissingFileError(f"{folder} has no checkpoint; name the --dir of `murmur join`")
    if round_number is None:
        return [*map(_describe, saved), f"`murmur rollback {folder} --round N` returns to one of them"]
    with run_dir.lock(load_manifest(folder / "run.toml")):
        chosen = [entry for entry in saved if entry.round == round_number]
        if not chosen:
            rounds = ", ".join(str(entry.round) for entry in saved)
            raise UsageError(f"there is no checkpoint of round {round_number}; there are those of {rounds}")
        later = saved[saved.index(chosen[-1]) + 1 :]
        _set_aside(folder / SET_ASIDE_FOLDER, later)
    return [
        f"the next `murmur join {folder}` goes on from round {round_number}",
        f"{len(later)} later checkpoints are in {folder / SET_ASIDE_FOLDER}; remove them when you need them no more",
    ]


def _describe(entry: SavedCheckpoint) -> str:
    kept = ", kept because another chain replaced it" if entry.is_kept else ""
    return f"round {entry.round}: {entry.path}{kept}"


def _set_aside(folder: Path, entries: list[SavedCheckpoint]) -> None:
    try:
        for entry in entries:
            target = folder / entry.path.name
            target.parent.mkdir(mode=0o700, exist_ok=True)
            if target.exists():
                shutil.rmtree(target)
            entry.path.rename(target)
    except OSError as error:
        raise StorageError(f"cannot move a checkpoint to {folder}: {error.strerror}; free some space") from error
