"""Read pretrained weights: the folder that `model.from` names, here or on the Hugging Face hub, and its tensors.

Nothing is read before names, shapes and types of all tensors are those of the model; a fault names each tensor. The
weights of round 0 are these, or are drawn from the seed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import safetensors
import torch
from torch import Tensor

from node.model.adapter import FrozenWeights
from node.model.config_keys import join_faults
from node.model.decoders.family import EMBEDDING
from node.model.families import model_family, shape_table
from node.model.initialization import initial_weights
from node.model.shapes import WHOLE, Cut, Entry, ShapeTable
from protocol.errors import CheckpointError, DataError, MissingFileError, UnreachableError, UsageError
from protocol.fault_words import shorten
from protocol.manifest.model import HUB_SCHEME, ModelSection
from protocol.manifest.run import Manifest

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 64 * 2**20
READABLE_TYPES: Final = ("F32", "BF16", "F16")
MAX_NAME_BYTES: Final = 255
OUTPUT: Final = "lm_head.weight"
HUB_NAME: Final = re.compile(r"hf:(?P<name>\w[\w.-]{0,95}(/\w[\w.-]{0,95})?)@(?P<revision>\w[\w./-]{0,95})", re.ASCII)
ALLOWED: Final = "MURMUR_ALLOW_HUB"
FILES: Final = ["config.json", "*.safetensors", "model.safetensors.index.json"]


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file: its place, shape and type."""

    file: Any  # safetensors has no types
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The open weights of a folder, checked against a model. Use it as a context manager."""

    def __init__(self, folder: Path, config: ModelSection) -> None:
        self._folder = folder
        self._config = config = config.with_adapter(None)
        self._family = model_family(config)
        self._table = shape_table(config)
        self._stack = ExitStack()
        self._places: dict[str, TensorPlace] = {}

    def __enter__(self) -> Self:
        """Open all files and check them. Raises MissingFileError or CheckpointError, one line."""
        try:
            self._places = _open_all(self._folder, self._stack)
            faults = list(self._faults())
            faults = faults or list(self._tied_faults())
            if faults:
                raise CheckpointError(f"{self._folder} does not have this model's weights: {join_faults(faults)}")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._places.clear()
        self._stack.close()

    def load(self, cut: Cut = WHOLE) -> Tensor:
        """Return the weights of the model or of a stage as one flat fp32 vector. Raises CheckpointError."""
        table = shape_table(self._config, cut)
        flat = torch.empty(table.numel)
        self._fill(table, flat)
        return flat

    def digests(self) -> tuple[str, ...]:
        """Return the hash of each block's weights. Raises CheckpointError."""
        return tuple(_digest(flat) for flat, _ in self.blocks())

    def blocks(self) -> Iterator[tuple[Tensor, ShapeTable]]:
        """Yield the weights of each block, flat fp32, one of which is in memory at a time. Raises CheckpointError."""
        shapes = dict(self._table.entries)
        for block in self._table.blocks:
            table = ShapeTable(tuple((name, shapes[name]) for name in block))
            yield self._filled(table), table

    def _filled(self, table: ShapeTable) -> Tensor:
        flat = torch.empty(table.numel)
        self._fill(table, flat)
        return flat

    def _fill(self, table: ShapeTable, flat: Tensor) -> None:
        for name, view in table.views(flat).items():
            theirs = self._family.hugging_face_name(name)
            view.copy_(self._places[theirs].file.get_tensor(theirs))
            if not bool(torch.isfinite(view).all()):
                raise CheckpointError(f"{theirs} in {self._folder} has values that are not finite; use other weights")

    def _faults(self) -> Iterator[str]:
        wanted = {self._family.hugging_face_name(name): shape for name, shape in self._table.entries}
        yield from (f"{name} is missing" for name in wanted if name not in self._places)
        for name, place in self._places.items():
            if name not in wanted:
                if not self._is_harmless(name):
                    yield f"{name} is not a part of the model"
            elif place.shape != wanted[name]:
                yield f"{name} has the shape {list(place.shape)} instead of {list(wanted[name])}"
            elif place.dtype not in READABLE_TYPES:
                yield f"{name} has the type {place.dtype}, not one of {', '.join(READABLE_TYPES)}"

    def _tied_faults(self) -> Iterator[str]:
        """Yield a fault if the file has another output matrix than the shared one; transformers would use that one."""
        place = self._places.get(OUTPUT)
        if not self._config.tied or place is None:
            return
        name = self._family.hugging_face_name(EMBEDDING)
        shared = self._places[name].file.get_tensor(name)
        if not torch.equal(place.file.get_tensor(OUTPUT).float(), shared.float()):
            yield f"{OUTPUT} differs from {name}, although tie_word_embeddings is true; set it to false"

    def _is_harmless(self, name: str) -> bool:
        """Return whether a tensor repeats what we have: the shared output matrix, or tables of positions."""
        return (self._config.tied and name == OUTPUT) or name.endswith(".rotary_emb.inv_freq")


def read_shapes(folder: Path) -> tuple[Entry, ...]:
    """Return names and shapes in a folder, or in one file. Raises MissingFileError or CheckpointError."""
    with ExitStack() as stack:
        return tuple((name, place.shape) for name, place in _open_all(folder, stack).items())


def _open_all(folder: Path, stack: ExitStack) -> dict[str, TensorPlace]:
    """Open the files of a folder, or one file. A tensor in several shards is read from the one that the index names."""
    paths, assigned = _shards(folder)
    places = dict[str, TensorPlace]()
    for path in paths:
        found = _open_shard(path, stack)
        places |= {name: place for name, place in found.items() if assigned.get(name, path.name) == path.name}
    return places


def _open_shard(path: Path, stack: ExitStack) -> dict[str, TensorPlace]:
    try:
        file: Any = stack.enter_context(safetensors.safe_open(path, framework="pt"))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} is missing; download all shards of the model") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({shorten(str(error))}); download it again") from error
    return {name: TensorPlace(file, tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}


def block_digests(config: ModelSection, flat: Tensor, cut: Cut = WHOLE) -> tuple[str, ...]:
    """Return the hash of the weights of each block, of the model or of a stage."""
    table = shape_table(config, cut)
    sizes = dict(zip(table.names, table.sizes, strict=True))
    lengths = [sum(sizes[name] for name in block) for block in table.blocks]
    return tuple(_digest(block) for block in torch.split(flat, lengths))


def expected_digests(config: ModelSection, cut: Cut = WHOLE) -> tuple[str, ...]:
    """Return those of the manifest for the model or a stage."""
    numbers = model_family(config).block_range(config, cut)
    return config.weights[numbers.start : numbers.stop]


def _digest(block: Tensor) -> str:
    return hashlib.sha256(block.numpy().data).hexdigest()


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files of weights in a folder, or the one that is named, and the shard of each tensor by the index.

    Raises MissingFileError or CheckpointError.
    """
    if folder.is_file():
        return [folder], {}
    if not folder.is_dir():
        raise MissingFileError(f"there is no folder {folder}; name one with config.json and model.safetensors")
    if not (folder / INDEX_FILE).exists():
        if not (folder / SINGLE_FILE).exists():
            raise MissingFileError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; save it as safetensors")
        return [folder / SINGLE_FILE], {}
    assigned = _read_index(folder / INDEX_FILE)
    names = sorted(set(assigned.values()))
    if (folder / SINGLE_FILE).exists() and SINGLE_FILE not in names:
        # transformers reads the single file, other tools the shards: nobody knows which model is meant.
        raise CheckpointError(f"{folder} has {SINGLE_FILE} and also shards; remove those of another model")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        faults = join_faults([f"the shard {name} is missing" for name in missing])
        raise MissingFileError(f"{folder}: {faults}; download all shards of the model")
    return [folder / name for name in names], assigned


def _read_index(path: Path) -> dict[str, str]:
    """Return the shard of each tensor."""
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        index = json.loads(path.read_bytes())
        places: Mapping[str, str] = index["weight_map"]
        assigned = {str(tensor): str(name) for tensor, name in places.items()}
        if any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in assigned.values()):
            raise ValueError("it has a file name that is too long")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of shards ({shorten(str(error))}); download it again") from error
    if any(Path(name).name != name for name in assigned.values()):
        raise CheckpointError(f"{path} names files in other folders; download the model again")
    return assigned


def weights_folder(source: str, base: Path) -> Path:
    """Return the folder with the weights; a relative path starts at `base`.

    Raises:
        UsageError: the name is not complete, or the user has not allowed the hub.
        DataError: the package that downloads from the hub is not installed.
        UnreachableError: the hub does not answer, or does not have it.
    """
    if not source.startswith(HUB_SCHEME):
        return base / Path(source).expanduser()
    found = HUB_NAME.fullmatch(source)
    if not found:
        raise UsageError(f"model.from = {shorten(source)} is not hf:NAME@REVISION; name a revision, such as a commit")
    return _download(found["name"], found["revision"])


def _download(name: str, revision: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise DataError('weights of the hub need a package; run `pip install "murmuration[hf]"`') from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        if os.environ.get(ALLOWED) != "1":
            raise UsageError(
                f"the weights {name} are not in this machine's cache; set {ALLOWED}=1 to download them from the "
                "Hugging Face hub, or name a folder in model.from"
            ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # no network, no such model or revision; all errors of the hub are these
        reason = shorten(str(error).splitlines()[0] if str(error) else type(error).__name__, 150)
        raise UnreachableError(
            f"cannot download {name}@{revision} from the Hugging Face hub: {reason}; check the name and the network, "
            "or name a folder in model.from"
        ) from error


def start_weights(manifest: Manifest, base: Path, cut: Cut = WHOLE) -> Tensor | None:
    """Return the weights of round 0, of the model or of a stage: flat fp32 (numel,) on the CPU.

    `None` means that this machine has no copy of the weights with which the run starts, so peers must send them.

    Args:
        base: folder of the manifest; a relative `model.from` starts here.

    Raises:
        MissingFileError, CheckpointError: the folder does not have the weights of this run.
        UsageError, UnreachableError: they are on the hub, and cannot be downloaded.
    """
    model = manifest.model
    if not model.weights or model.adapter is not None:
        return initial_weights(model, manifest.run.seed, cut)
    if not model.from_:
        return None
    folder = weights_folder(model.from_, base)
    with WeightFiles(folder, model) as files:
        flat = files.load(cut)
    if not is_start(model, flat, cut):
        raise CheckpointError(f"{folder} has other weights than this run began with; name the right folder")
    return flat


def is_start(model: ModelSection, flat: Tensor, cut: Cut = WHOLE) -> bool:
    """Return whether weights are those that the manifest names; any are if it names none, or names frozen ones."""
    return (
        not model.weights
        or model.adapter is not None
        or block_digests(model, flat, cut) == expected_digests(model, cut)
    )


def read_frozen(model: ModelSection, base: Path) -> FrozenWeights | None:
    """Read the weights that an adapter changes, block by block, and check their hashes; `None` without an adapter.

    Args:
        base: a relative `model.from` starts here.

    Raises:
        UsageError: this machine has not named their folder.
        MissingFileError, CheckpointError: the folder does not have them.
    """
    if model.adapter is None:
        return None
    frozen = FrozenWeights(model.adapter.base)
    with WeightFiles(frozen_folder(model, base), model) as files:
        for (flat, table), expected in zip(files.blocks(), model.weights, strict=True):
            if _digest(flat) != expected:
                raise CheckpointError(
                    f"{frozen_folder(model, base)} has other weights than those that this run's adapter changes; name "
                    "the right folder in model.from"
                )
            frozen.add(table.views(flat))
    return frozen


def frozen_folder(model: ModelSection, base: Path) -> Path:
    """Return the folder of the weights that an adapter changes. Raises UsageError if it is not named."""
    if not model.from_:
        raise UsageError("this run trains an adapter of a model that you must have; name its folder: --base-model DIR")
    return weights_folder(model.from_, base)


def require_frozen(model: ModelSection, base: Path) -> None:
    """Raise MurmurError, one line, if a run has an adapter and this machine lacks the model; the hashes come later."""
    if model.adapter is not None:
        with WeightFiles(frozen_folder(model, base), model):
            pass
