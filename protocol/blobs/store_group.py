"""Read blobs from whichever of several stores has them: a node has one store for each of its replicas."""

from typing import Protocol

from protocol.blobs.blob import Blob, Bytes, check_digest
from protocol.errors import MissingFileError


class BlobReader(Protocol):
    """The part of a store that serves blobs: a BlobStore or a StoreGroup."""

    def blob(self, digest: bytes) -> Blob: ...

    def hashes(self, digest: bytes) -> bytes: ...

    def read_piece(self, digest: bytes, piece: int) -> Bytes: ...


class OwnedStore(BlobReader, Protocol):
    def has(self, digest: bytes) -> bool: ...


class StoreGroup:
    """The stores of a node. Each owner decides which of its blobs stay."""

    def __init__(self) -> None:
        self._stores: list[OwnedStore] = []

    def add(self, store: OwnedStore) -> None:
        self._stores.append(store)

    def remove(self, store: OwnedStore) -> None:
        """Serve the blobs of a store no longer."""
        self._stores.remove(store)

    def blob(self, digest: bytes) -> Blob:
        return self._find(digest).blob(digest)

    def hashes(self, digest: bytes) -> bytes:
        return self._find(digest).hashes(digest)

    def read_piece(self, digest: bytes, piece: int) -> Bytes:
        return self._find(digest).read_piece(digest, piece)

    def _find(self, digest: bytes) -> OwnedStore:
        check_digest(digest)
        for store in self._stores:
            if store.has(digest):
                return store
        raise MissingFileError(f"no blob {digest.hex()} here; fetch it first")
