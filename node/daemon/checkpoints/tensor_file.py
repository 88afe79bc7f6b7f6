"""Write vectors to safetensors files with a hash, and verify the hash before reading them.

The format is a length (8 bytes, little endian), a JSON header and the raw elements. The safetensors library can write
it, but neither from views into one vector nor with a hash. This module streams the vector to the file in chunks, so a
save needs 1 MiB of memory for a model of any size and reads nothing back. `TensorFile` reads such files tensor by
tensor, where the library maps the whole file; the library reads them too.

A flat vector is saved by parameter, under the names of the model, so that any program can use the file.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from node.model import ShapeTable

CHUNK_BYTES = 2**20
DTYPE_NAMES = {torch.float32: "F32", torch.uint8: "U8"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH_BYTES = 8


class DamagedError(ValueError):
    """A file that differs from the one that was written: missing, or of another size or hash."""


@dataclass(frozen=True)
class FileDigest:
    """The expected SHA-256 (hexadecimal) and size (bytes) of a file."""

    sha256: str
    size: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, sync: bool = True) -> FileDigest:
    """Write fp32 and uint8 tensors, on any device, to a new file; it is on disk when this returns, if `sync`."""
    return write_file(path, encode_tensors(tensors, {}), sync=sync)


def write_file(path: Path, chunks: Iterable[bytes], mode: int = 0o600, *, sync: bool = True) -> FileDigest:
    """Write a new file of this mode, less the umask; it is on disk when this returns, if `sync`.

    Raises FileExistsError.
    """
    digest, size = hashlib.sha256(), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    return FileDigest(digest.hexdigest(), size)


def sync_file(path: Path) -> None:
    """Return when the content of a file is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


class TensorFile:
    """The tensors of a file, each of which is read from disk when it is asked for."""

    def __init__(self, path: Path, digest: FileDigest) -> None:
        """Check the whole file. Raises DamagedError if it does not match `digest`."""
        _require_intact(path, digest)
        self._path = path
        with disk_damage(path), path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            self._entries: dict[str, Any] = json.loads(file.read(length))
        self._start = _LENGTH_BYTES + length
        self._entries.pop("__metadata__", None)
        self.names = frozenset(self._entries)

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises DamagedError if the disk fails."""
        entry = self._entries[name]
        tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        self.read_into({name: tensor})
        return tensor

    def read_into(self, rooms: Mapping[str, Tensor]) -> None:
        """Read tensors from disk to these places, without a copy in between; nothing is mapped.

        Raises ValueError if a place has another shape or type, and DamagedError if the disk fails.
        """
        with disk_damage(self._path), self._path.open("rb", buffering=0) as file:
            for name, room in rooms.items():
                entry = self._entries[name]
                if (list(room.shape), room.dtype) != (entry["shape"], DTYPES[entry["dtype"]]):
                    raise ValueError(f"{name} has shape {entry['shape']}, not {list(room.shape)}")
                file.seek(self._start + entry["data_offsets"][0])
                _fill(file, room.view(-1).numpy().view(np.uint8).data)


def _fill(file: io.RawIOBase, room: memoryview) -> None:
    while room:
        count = file.readinto(room)
        if not count:
            raise OSError("the file ends too early")
        room = room[count:]


@contextmanager
def disk_damage(path: Path) -> Iterator[None]:
    """Turn an OSError into a DamagedError."""
    try:
        yield
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error


def read_file(path: Path, digest: FileDigest) -> bytes:
    """Return the bytes of a file. Raises DamagedError if it does not match `digest`."""
    _require_intact(path, digest)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error


def _require_intact(path: Path, digest: FileDigest) -> None:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != digest.size:
                raise DamagedError(f"{path.name} has {size} bytes instead of {digest.size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != digest.sha256:
                raise DamagedError(f"{path.name} does not match its hash")
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error


def encode_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the content of a safetensors file in chunks."""
    yield _header(tensors, metadata)
    for tensor in tensors.values():
        elements = tensor.detach().cpu().contiguous().view(-1).numpy().view(np.uint8)
        for start in range(0, elements.size, CHUNK_BYTES):
            # A copy: the hashed bytes must equal the written ones even if another process writes to the tensor.
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


class SavedInner(Mapping[str, Tensor]):
    """The inner vectors of a checkpoint, each read from disk when it is asked for."""

    def __init__(self, file: TensorFile, names: Sequence[str], shapes: ShapeTable) -> None:
        self._file = file
        self._names = tuple(names)
        self._shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        parts = {part: f"{name}/{part}" for part in self._shapes.names}
        if not self._file.names.isdisjoint(parts.values()):
            return read_flat(self._file, parts, self._shapes)
        return self._file.read(name)

    def copy_to(self, name: str, out: Tensor) -> None:
        """Read a vector from disk into `out`, without another copy of it. Raises ValueError if its size differs."""
        parts = {part: f"{name}/{part}" for part in self._shapes.names}
        if out.numel() == self._shapes.numel and not self._file.names.isdisjoint(parts.values()):
            _fill_flat(self._file, parts, self._shapes, out)
        elif name in self._file.names:
            self._file.read_into({name: out})
        else:
            raise ValueError(f"vector {name} is saved by parameter, and has not {out.numel()} values")

    def __contains__(self, name: object) -> bool:
        return name in self._names  # the method of Mapping would read the vector

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def name_tensors(name: str, vector: Tensor, shapes: ShapeTable) -> dict[str, Tensor]:
    """Split a vector by parameter; keep raw bytes or values of another length whole, under their own name."""
    is_raw = vector.dtype == torch.uint8 or vector.numel() != shapes.numel
    return {name: vector} if is_raw else shapes.views(vector)


def name_inner_tensors(inner: Mapping[str, Tensor], shapes: ShapeTable) -> dict[str, Tensor]:
    """Split all vectors by parameter, as <vector>/<parameter name>."""
    named: dict[str, Tensor] = {}
    for name, vector in inner.items():
        parts = name_tensors(name, vector, shapes)
        named |= parts if name in parts else {f"{name}/{part}": view for part, view in parts.items()}
    return named


def read_flat(file: TensorFile, stored: Mapping[str, str], shapes: ShapeTable, room: Tensor | None = None) -> Tensor:
    """Read one vector, whose part of each parameter has this name in the file, into `room` if it is given."""
    flat = torch.empty(shapes.numel) if room is None else room
    _fill_flat(file, stored, shapes, flat)
    return flat


def _fill_flat(file: TensorFile, stored: Mapping[str, str], shapes: ShapeTable, flat: Tensor) -> None:
    file.read_into({stored[name]: view for name, view in shapes.views(flat).items()})
