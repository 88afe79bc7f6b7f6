"""The flat vectors of a checkpoint in files of tensors, by the names of the model's parameters."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from node.daemon.checkpoints.tensor_file import TensorFile
from node.model import ShapeTable


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
