"""`murmur rollback`: list the checkpoints of a node that is stopped, and make an earlier one the newest.

A node that goes back makes rounds again which its key has signed already. Two statements of one key for one place are a
proof against it (`protocol.conduct`), which any peer may hold that comes back later. So a rolled back node begins a new
key; the old one stays next to the later checkpoints.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from node.daemon.checkpoints.checkpoint_folders import list_checkpoints
from node.run_dir import RunDir
from protocol.errors import MissingFileError, StorageError, UsageError
from protocol.identity import Identity
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest

SET_ASIDE_FOLDER = "rolled-back"


def roll_back(folder: Path, round_number: int | None) -> list[str]:
    """List the checkpoints, or return to that of a round; returns the lines to print. Raises MurmurError."""
    run_dir = RunDir(folder)
    saved = list_checkpoints(run_dir.checkpoints)
    if not saved:
        raise MissingFileError(f"{folder} has no checkpoint; name the --dir of `murmur join`")
    if round_number is None:
        lines = [f"round {entry.round}: {entry.path}{_why_kept(entry.is_kept)}" for entry in saved]
        return [*lines, f"`murmur rollback {folder} --round N` returns to one of them, with a new key"]
    manifest = load_manifest(folder / "run.toml")
    with run_dir.lock(manifest):
        chosen = [entry for entry in saved if entry.round == round_number]
        if not chosen:
            rounds = ", ".join(str(entry.round) for entry in saved)
            raise UsageError(f"there is no checkpoint of round {round_number}; there are those of {rounds}")
        later = saved[saved.index(chosen[-1]) + 1 :]
        if not later:
            return [f"round {round_number} is the newest checkpoint already; nothing was changed"]
        signed = [path for path in (run_dir.key, run_dir.vote_log, run_dir.ticket) if path.exists()]
        old_key = Identity.load_or_create(run_dir.key).peer_id if signed else ""
        # The key first: a node that is stopped halfway must not go on from the earlier round with the old one.
        _set_aside(folder / SET_ASIDE_FOLDER, [*signed, *(entry.path for entry in later)])
    return [
        f"the next `murmur join {folder}` goes on from round {round_number}, with a new key: "
        "the old one has signed later rounds, and would be excluded if it signed them again",
        *_describe_admission(manifest, old_key),
        f"the old key and {len(later)} later checkpoints are in {folder / SET_ASIDE_FOLDER}; "
        "remove them when you need them no more",
    ]


def _why_kept(is_kept: bool) -> str:
    return ", kept because another chain replaced it" if is_kept else ""


def _describe_admission(manifest: Manifest, old_key: str) -> list[str]:
    """Return the lines about the rights of the old key that the new one lacks."""
    lines = []
    if manifest.admission.mode == "tickets":
        lines.append(
            "this run admits tickets: ask its organiser for one for the new key, which `murmur key DIR --create` prints"
        )
    elif manifest.admission.mode == "list":
        lines.append(
            "this run admits the keys of its list alone: to go on from here, `murmur export DIR OUT`, and begin a new "
            "run with model.from = OUT"
        )
    if old_key and old_key == manifest.run.organiser_key:
        lines.append("the old key is the organiser's: keep it, `murmur steer` and tickets need it")
    return lines


def _set_aside(folder: Path, paths: Iterable[Path]) -> None:
    """Move files and folders; an earlier key that is there keeps its place under another name."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in paths:
            target = folder / path.name
            if path.is_dir() and target.exists():
                shutil.rmtree(target)
            number = 1
            while target.exists():
                number += 1
                target = folder / f"{path.name}-{number}"
            path.rename(target)
    except OSError as error:
        raise StorageError(f"cannot move files to {folder}: {error.strerror}; free some space") from error
