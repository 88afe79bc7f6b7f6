"""Remember in a node's folder where its run came from and who organises it.

    DIR/invitation.json   {"organiser": peer id or null, "sources": [URL, link or file], "base": folder or null}

The organiser's key is pinned: a folder never takes another one. A URL is also compared with the pins of all other runs
joined on this machine, so that an attacker who takes over a web server cannot replace the run by one of another key
unnoticed. With the sources, a node resumes although its host is gone or its manifest file was removed.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from node.commands.join.invitation import Invitation, normalize_run, open_invitation
from node.paths import joined_dirs
from protocol.errors import MissingFileError, MurmurError, OrganiserError, StorageError
from protocol.files import write_atomically
from protocol.identity import PeerId
from protocol.signing import fingerprint, load_signed_manifest

logger = logging.getLogger(__name__)

INVITATION_FILE = "invitation.json"
MANIFEST_FILE = "run.toml"
DATA = "data"  # in the node's folder: where the paths of a downloaded manifest start
MAX_SOURCES = 16


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
        if saved and saved.organiser not in (None, invitation.organiser):
            raise OrganiserError(_changed_key_text(saved, invitation.organiser))
    return own is None or own.organiser is None


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
