"""Whose run a folder belongs to: the organiser's key is kept at the first visit, and another one refused from then on.

    DIR/organiser.json   {"organiser": peer id, "source": the address it came from}

An address is also looked up in the folders of all other runs joined here: whoever takes over a web server cannot put
a run of another key in the place of the old one unnoticed.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from node.folder import write_atomically
from node.links import Invitation
from node.places import state_home
from protocol.errors import OrganiserError
from protocol.identity import PeerId
from protocol.manifest import load_manifest
from protocol.signed_manifest import fingerprint

ORGANISER_FILE = "organiser.json"
MANIFEST_FILE = "run.toml"


@dataclass(frozen=True)
class OrganiserPin:
    path: Path
    organiser: PeerId
    source: str | None


def check_pin(folder: Path, invitation: Invitation) -> bool:
    """Whether the key is new here. Raises OrganiserError for one that is not the first."""
    if invitation.organiser is None:
        return False
    own = _read_pin(folder / ORGANISER_FILE)
    others = _pins_from_source(state_home().glob(f"*/{ORGANISER_FILE}"), invitation.source) if invitation.source else []
    for pin in [own, *others]:
        if pin is not None and pin.organiser != invitation.organiser:
            raise OrganiserError(_changed_key_text(pin, invitation.organiser))
    return own is None


def recall_invitation(source: str, folder: Path | None) -> Invitation | None:
    """The run that was joined before from that address, in that folder or (None) in any; the one joined last."""
    paths = [folder / ORGANISER_FILE] if folder else state_home().glob(f"*/{ORGANISER_FILE}")
    found = [pin for pin in _pins_from_source(paths, source) if (pin.path.parent / MANIFEST_FILE).exists()]
    if not found:
        return None
    pin = max(found, key=lambda pin: (pin.path.parent / MANIFEST_FILE).stat().st_mtime)
    return Invitation(load_manifest(pin.path.parent / MANIFEST_FILE), pin.organiser, None, source)


def save_pin(folder: Path, invitation: Invitation) -> None:
    """Raises StorageError."""
    values = {"organiser": invitation.organiser, "source": invitation.source}
    write_atomically(folder / ORGANISER_FILE, json.dumps(values).encode())


def _changed_key_text(pin: OrganiserPin, organiser: PeerId) -> str:
    return (
        f"the run is signed by another key ({fingerprint(organiser)}) than before ({fingerprint(pin.organiser)}): "
        f"ask the organiser; if the new key is right, remove {pin.path}"
    )


def _pins_from_source(paths: Iterable[Path], source: str) -> list[OrganiserPin]:
    return [pin for pin in map(_read_pin, paths) if pin is not None and pin.source == source]


def _read_pin(path: Path) -> OrganiserPin | None:
    try:
        values = json.loads(path.read_bytes())
        return OrganiserPin(path, str(values["organiser"]), values["source"] and str(values["source"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OrganiserError(f"{path} cannot be read; restore it, or remove it and compare the fingerprint") from error
