"""Tensor files (safetensors) that are hashed while they are written and checked before they are read.

The format is a length (8 bytes, little endian), a JSON header and the raw elements. The safetensors library writes it
too, but neither from views into one vector nor with a hash; here the bytes pass from the vector to the file a chunk at
a time, so a save needs 1 MiB of memory whatever the model's size, and nothing is read back. The library reads.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

CHUNK_BYTES = 2**20
DTYPE_NAMES = {torch.float32: "F32", torch.uint8: "U8"}


class DamagedError(ValueError):
    """A file that is not what was written: missing, of another size, or of another hash."""


@dataclass(frozen=True)
class FileDigest:
    """What a file must be to be trusted: SHA-256 in hexadecimal digits, and its length."""

    sha256: str
    size: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileDigest:
    """A new safetensors file of fp32 and uint8 tensors on any device, on disk when this returns."""
    return write_file(path, _encode(tensors, metadata or {}))


def write_file(path: Path, chunks: Iterable[bytes]) -> FileDigest:
    """A new file (mode 0600) that is on disk when this returns; FileExistsError rather than overwriting one."""
    digest, size = hashlib.sha256(), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(digest.hexdigest(), size)


def read_tensors(path: Path, digest: FileDigest) -> dict[str, Tensor]:
    """The tensors of a file that matches its seal; DamagedError, before any tensor is built, when it does not."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != digest.size:
                raise DamagedError(f"{path.name} has {size} bytes instead of {digest.size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != digest.sha256:
                raise DamagedError(f"{path.name} does not match its hash")
        return dict(safetensors.torch.load_file(path))
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error


def _encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes]:
    yield _header(tensors, metadata)
    for tensor in tensors.values():
        elements = tensor.detach().cpu().contiguous().view(-1).numpy().view(np.uint8)
        for start in range(0, elements.size, CHUNK_BYTES):
            # A copy, so that what is hashed is what is written even where the tensor is memory that others write to.
            yield elements[start : start + CHUNK_BYTES].tobytes()


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        kind = DTYPE_NAMES[tensor.dtype]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # elements start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
