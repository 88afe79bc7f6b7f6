"""Names that a test turns on and off in a running process: the attack of a hostile node, or a rule of an honest one.

A process reads them from a file in its folder, so that one swarm can serve clean phases, attacks and controls.
"""

import json
import os
from pathlib import Path

FILE = "switches.json"
USED_FILE = "used-{}"


class Switches:
    """The names that are on now, read again whenever the file changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._version = -1
        self._names: list[str] = []

    def is_on(self, name: str) -> bool:
        return name in self._read()

    def names(self) -> set[str]:
        return set(self._read())

    def note_use(self, name: str) -> None:
        """Record that what a switch turns on has happened: a liar may have to wait for its turn to lead."""
        path = self._path.with_name(USED_FILE.format(name))
        if not path.exists():
            path.touch()

    def _read(self) -> list[str]:
        try:
            version = os.stat(self._path).st_mtime_ns
            if version != self._version:
                self._names, self._version = json.loads(self._path.read_bytes()), version
        except FileNotFoundError:
            self._names = []
        return self._names


def was_used(folder: Path, name: str) -> bool:
    """Return whether what a switch turns on has happened in the process of a folder, since it was turned on."""
    return (folder / USED_FILE.format(name)).exists()


def set_switches(folder: Path, *names: str) -> None:
    """Turn exactly these names on in the process of a folder."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in names:
        (folder / USED_FILE.format(name)).unlink(missing_ok=True)
    draft = folder / f".{FILE}"
    draft.write_text(json.dumps(names))
    os.replace(draft, folder / FILE)
