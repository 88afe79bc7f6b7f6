"""The last message of our trainer that others may have, on disk before anybody hears of it.

A checkpoint may be older than that message. Without this a start from it would send the same work in another one.
"""

import json
from pathlib import Path
from typing import Any

from node.channel import Message
from node.daemon.offers import Offer
from node.folder import write_atomically
from protocol.blobs.blob import Blob
from protocol.errors import StorageError


class OfferFile:
    """Its parts lie in the blob store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, offer: Offer) -> None:
        """On disk once this returns. Raises StorageError."""
        parts = [{"digest": blob.digest.hex(), "size": blob.size} for blob in offer.parts]
        values = {"message": offer.message.model_dump(mode="json"), "parts": parts}
        write_atomically(self._path, json.dumps(values).encode())

    def load(self) -> Offer | None:
        """None: nothing was ever sent. Raises StorageError for what `save` did not write."""
        try:
            return _offer_of(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as error:
            text = f"cannot read {self._path}: {error.strerror}; mend its folder, or choose another --dir"
            raise StorageError(text) from error
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{self._path} is damaged: remove it together with the folder checkpoints") from error

    def forget(self) -> None:
        """A trainer that knows of nothing begins to count its messages anew. Raises StorageError."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot remove {self._path}: {error.strerror}; mend its folder") from error


def _offer_of(values: dict[str, Any]) -> Offer:
    parts = tuple(Blob(bytes.fromhex(part["digest"]), int(part["size"])) for part in values["parts"])
    return Offer(Message.model_validate(values["message"]), parts)
