"""The last message of our trainer that others may have, on disk before anybody hears of it.

A checkpoint may be older than that message. Without this a start from it would send the same work in another one.
"""

import json
from pathlib import Path
from typing import Any

from node.daemon.offers import StoredContribution, SettledContribution, LastSent
from node.folder import write_atomically
from protocol.errors import StorageError


class ContributionFile:
    """Its parts lie in the blob store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, last_sent: LastSent) -> None:
        """On disk once this returns. Raises StorageError."""
        values = {**last_sent.contribution.to_json(), "past": [entry.to_json() for entry in last_sent.settled]}
        write_atomically(self._path, json.dumps(values).encode())

    def load(self) -> LastSent | None:
        """None: nothing was ever sent. Raises StorageError for what `save` did not write."""
        try:
            return _last_sent_from_json(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as error:
            text = f"cannot read {self._path}: {error.strerror}; mend its folder, or choose another --dir"
            raise StorageError(text) from error
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{self._path} is damaged: remove it together with the folder checkpoints") from error

    def delete(self) -> None:
        """A trainer that knows of nothing begins to count its messages anew. Raises StorageError."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot remove {self._path}: {error.strerror}; mend its folder") from error


def _last_sent_from_json(values: dict[str, Any]) -> LastSent:
    return LastSent(StoredContribution.from_json(values), tuple(SettledContribution.from_json(entry) for entry in values["past"]))
