"""The files of a blob store's folder, by the digests in their names (`protocol.blobs.store` lists the kinds)."""

import re
from pathlib import Path

from protocol.blobs.storage import disk_errors

_FILE_NAME = re.compile(r"([0-9a-f]{64})(\.part|\.pieces)?")


def scan_folder(folder: Path) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """Return the sizes of the complete and of the partial blobs; remove the files that are of no use.

    A partial blob without its piece hashes cannot be resumed.
    """
    complete, partial = dict[bytes, int](), dict[bytes, int]()
    with_hashes: set[bytes] = set()
    for entry in folder.iterdir():
        match = _FILE_NAME.fullmatch(entry.name)
        if match is None:
            if entry.suffix == ".new":
                entry.unlink()
            continue
        digest = bytes.fromhex(match[1])
        if match[2] == ".pieces":
            with_hashes.add(digest)
        else:
            (partial if match[2] else complete)[digest] = entry.stat().st_size
    resumable = {digest: size for digest, size in partial.items() if digest in with_hashes and digest not in complete}
    for digest in partial.keys() - resumable.keys():
        remove_files(folder, digest, ".part")
    for digest in with_hashes - resumable.keys() - complete.keys():
        remove_files(folder, digest, ".pieces")
    return complete, resumable


def remove_files(folder: Path, digest: bytes, *suffixes: str) -> None:
    """Remove the files of a blob with these suffixes, if they exist. Raises StorageError."""
    with disk_errors(folder):
        for suffix in suffixes:
            (folder / f"{digest.hex()}{suffix}").unlink(missing_ok=True)
