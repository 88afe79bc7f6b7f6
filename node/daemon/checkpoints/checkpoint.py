"""Save and load checkpoints. A kill at any instant leaves the previous one whole; a damaged one is never used.

    <folder>/0000000007.round-12/       the 7th save, of round 12
        anchor.safetensors              the shared weights, by Hugging Face parameter name
        outer.<slot>.safetensors        one file per vector of the outer optimizer, of any length
        inner.safetensors               this peer's own vectors, as <vector>/<parameter name>, and raw bytes or values
        chain.bin                       the last commits of the chain with their certificates
        manifest.json                   everything else, with the hash and size of each file, and a hash of itself

A save writes a new hidden folder, syncs each file and the folder, renames it and syncs the parent. Only then does it
prune old checkpoints, each hidden by a rename before it is deleted. So every folder with a checkpoint's name was
complete once; the leftovers of a dead process are hidden, and the next save removes them. Names count saves, not
rounds: a round may be saved twice, and a peer that switches to another chain may return to a lower round.
A folder has one writer. The format depends neither on peers nor on how a model is cut into stages, so any layout can
load it.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from torch import Tensor

from node.daemon.checkpoints.checkpoint_folders import MANIFEST, list_checkpoints, next_number, prune, remove_hidden
from node.daemon.checkpoints.tensor_file import (
    DamagedError,
    FileDigest,
    SavedInner,
    TensorFile,
    name_inner_tensors,
    name_tensors,
    read_file,
    read_flat,
    sync_file,
    write_file,
    write_tensors,
)
from node.model import ShapeTable
from optim.inner.base import WEIGHTS
from protocol import murmur_pb2 as wire
from protocol.consensus.chain import Chain, ChainHead, ChainLog
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.messages.kinds import nested_reader
from protocol.electorate import Electorate
from protocol.errors import CheckpointError, OtherRunError, PeerFault, StorageError
from protocol.manifest.run import RunId
from protocol.manifest.sections import AdmissionSection

logger = logging.getLogger(__name__)

SCHEMA = 2
ANCHOR = "anchor.safetensors"
INNER = "inner.safetensors"
NEXT_INNER = ".inner.safetensors"  # in the folder of all checkpoints
CHAIN = "chain.bin"
Json = dict[str, Any]
Rooms = Mapping[str, Tensor]
Built = TypeVar("Built")
HEAD_KEY = "head"
STRONG_KEY = "strong_electorate"


@dataclass(frozen=True)
class SavedChain:
    """The chain in a checkpoint: the table of its head as JSON, and the bytes of its last commits with certificates.

    The table also has the electorate of the last strongly certified head, to which the commits may not reach back.
    """

    table: Mapping[str, Any]
    log: bytes

    @classmethod
    def of(cls, head: ChainHead, log: ChainLog, **more: object) -> "SavedChain":
        """Build a chain to save; `more` values join the head in the table."""
        strong = {} if log.strong is None else {STRONG_KEY: log.strong.to_json()}
        table = {HEAD_KEY: head.to_json(), **strong, **more}
        return cls(table, log.to_wire().SerializeToString(deterministic=True))

    def restore(self, rule: AdmissionSection, limits: ContributionLimits) -> Chain:
        """Rebuild the chain. Raises CheckpointError if another program wrote it."""
        head = ChainHead.from_json(self.table[HEAD_KEY])
        try:
            log = ChainLog.from_wire(wire.ChainLog.FromString(self.log), rule, limits, nested_reader(limits))
            strong = Electorate.from_json(self.table[STRONG_KEY], rule) if STRONG_KEY in self.table else None
        except (PeerFault, DecodeError) as error:
            raise CheckpointError(f"the commits in the checkpoint are damaged: {error}; use an earlier one") from error
        if log.electorates[-1].round != head.round:
            raise CheckpointError("the voters in the checkpoint are of another round; use an earlier checkpoint")
        return Chain(head, replace(log, strong=strong))


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything a peer needs to resume. Vectors are flat fp32 (numel,), in the order of the shape table."""

    run_id: RunId
    shapes: bytes  # hash of the shape table
    round: int
    digest: bytes  # of the chain of commits up to the anchor
    chain: SavedChain  # its table is JSON, like inner_meta
    anchor: Tensor
    outer: Mapping[str, Tensor]  # slot to vector; the memory of an aggregate has its own length
    inner: Mapping[str, Tensor]  # vectors, or raw fp32 or uint8 of any other length
    inner_meta: Json
    written: "WrittenInner | None" = None  # saved in the place of `inner`


@dataclass(frozen=True)
class WrittenInner:
    """The inner vectors in a file that a save moves into its folder."""

    path: Path
    digest: FileDigest
    names: tuple[str, ...]
    meta: Json


def write_inner(folder: Path, inner: Mapping[str, Tensor], meta: Json, shapes: ShapeTable) -> WrittenInner:
    """Write the inner vectors of the next save to a file; it is not on disk yet. Raises StorageError."""
    path = folder / NEXT_INNER
    try:
        _create_folder(folder)
        path.unlink(missing_ok=True)
        digest = write_tensors(path, name_inner_tensors(inner, shapes), sync=False)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; free some space or move the folder") from error
    return WrittenInner(path, digest, tuple(inner), meta)


def save(folder: Path, checkpoint: Checkpoint, shapes: ShapeTable, keep: int) -> Path:
    """Write a checkpoint, then prune all but the newest `keep`; return the new one's folder.

    The checkpoint is on disk when this returns.

    Raises:
        StorageError: The disk is full or fails; the older checkpoints are unchanged.
    """
    if checkpoint.shapes != shapes.hash():
        raise ValueError("the checkpoint was made for another shape table")
    try:
        _create_folder(folder)
        remove_hidden(folder)
        target = folder / f"{next_number(folder):010d}.round-{checkpoint.round}"
        _publish(target, checkpoint, shapes)
        prune(folder, keep)
    except OSError as error:
        with contextlib.suppress(OSError):  # best effort: the next save retries
            remove_hidden(folder)
        raise StorageError(
            f"cannot save round {checkpoint.round} in {folder}: {error.strerror}; "
            "free some space or move the folder; the previous checkpoint is kept"
        ) from error
    return target


def load_newest(
    folder: Path, run_id: RunId, shapes: ShapeTable, rooms: Sequence[Rooms] = ({}, {})
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest whole checkpoint, if any, and a line for each newer damaged one, which the caller reports.

    Args:
        rooms: places of shared vectors by name, for even and for odd rounds; the others are in new memory.

    Raises:
        OtherRunError: The newest whole checkpoint belongs to another run.
        CheckpointError: It has other shapes or another format.
    """

    def build(path: Path, body: Json) -> Checkpoint:
        return _read(path, body, shapes, rooms[body["round"] % 2])

    return _load_newest_with(folder, run_id, shapes, build)


def load_newest_chain(folder: Path, run_id: RunId, shapes: ShapeTable) -> SavedChain | None:
    """Return the chain of the newest checkpoint, without its vectors; None if there is no checkpoint.

    Raises OtherRunError or CheckpointError, as `load_newest` does.
    """

    def build(path: Path, body: Json) -> SavedChain:
        return _read_chain(path, body)

    return _load_newest_with(folder, run_id, shapes, build)[0]


@dataclass(frozen=True, eq=False)
class SavedAnchor:
    """The shared weights of a checkpoint, flat fp32 (numel,), and the tokens of the run so far, if it has them."""

    round: int
    tokens: int | None
    anchor: Tensor


def load_anchor(folder: Path, run_id: RunId, shapes: ShapeTable, name: str | None = None) -> SavedAnchor:
    """Return the anchor of the newest whole checkpoint, or of the one of that name, and read no other file.

    Raises CheckpointError if there is none, or OtherRunError.
    """

    def build(path: Path, body: Json) -> SavedAnchor:
        return _read_anchor(path, body, shapes)

    loaded, skipped = _load_newest_with(folder, run_id, shapes, build, name)
    for line in skipped:
        logger.warning("skipped the checkpoint %s", line)
    if loaded is None:
        reason = f"all are damaged ({skipped[0]})" if skipped else "there is none yet"
        raise CheckpointError(f"no usable checkpoint in {folder}: {reason}; let the node finish a round first")
    return loaded


def _read_anchor(path: Path, body: Json, shapes: ShapeTable) -> SavedAnchor:
    tokens = body["chain"].get(HEAD_KEY, {}).get("tokens")
    return SavedAnchor(int(body["round"]), tokens, _read_vector(path, ANCHOR, body, shapes))


def _publish(target: Path, checkpoint: Checkpoint, shapes: ShapeTable) -> None:
    staging = target.with_name(f".{target.name}")
    staging.mkdir(mode=0o700)
    _write(staging, checkpoint, shapes)
    _fsync_dir(staging)
    staging.rename(target)
    _fsync_dir(target.parent)


def _write(folder: Path, checkpoint: Checkpoint, shapes: ShapeTable) -> None:
    files = {ANCHOR: shapes.views(checkpoint.anchor)}
    files |= {_outer_file(slot): name_tensors(slot, vector, shapes) for slot, vector in checkpoint.outer.items()}
    digests = {name: write_tensors(folder / name, tensors) for name, tensors in files.items()}
    if checkpoint.written is not None:
        sync_file(checkpoint.written.path)
        checkpoint.written.path.rename(folder / INNER)
        digests[INNER] = checkpoint.written.digest
    else:
        digests[INNER] = write_tensors(folder / INNER, name_inner_tensors(checkpoint.inner, shapes))
    digests[CHAIN] = write_file(folder / CHAIN, [checkpoint.chain.log])
    write_file(folder / MANIFEST, [_encode_manifest(_body(checkpoint, digests))])


def _body(checkpoint: Checkpoint, digests: Mapping[str, FileDigest]) -> Json:
    return {
        "schema": SCHEMA,
        "run_id": checkpoint.run_id,
        "shapes": checkpoint.shapes.hex(),
        "round": checkpoint.round,
        "digest": checkpoint.digest.hex(),
        "chain": dict(checkpoint.chain.table),
        "outer": list(checkpoint.outer),
        "inner": list(checkpoint.inner if checkpoint.written is None else checkpoint.written.names),
        "inner_meta": checkpoint.inner_meta,
        "files": {name: {"sha256": digest.sha256, "size": digest.size} for name, digest in digests.items()},
    }


def _encode_manifest(body: Json) -> bytes:
    text = json.dumps(body, indent=1)
    return json.dumps({"body": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}, indent=1).encode()


def _read_manifest(folder: Path) -> Json:
    """Return the manifest's body. Raises DamagedError unless its bytes equal the output of `_encode_manifest`."""
    try:
        text = (folder / MANIFEST).read_bytes()
        body = json.loads(text)["body"]
        is_intact = _encode_manifest(body) == text
    except OSError as error:
        raise DamagedError(f"{MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} is not readable") from error
    if not is_intact:
        raise DamagedError(f"{MANIFEST} does not match its hash")
    return dict(body)


def _load_newest_with(
    folder: Path,
    run_id: RunId,
    shapes: ShapeTable,
    build: Callable[[Path, Json], Built],
    name: str | None = None,
) -> tuple[Built | None, list[str]]:
    skipped: list[str] = []
    for saved in reversed(list_checkpoints(folder)):
        path = saved.path
        if name not in (None, path.name):
            continue
        try:
            body = _read_manifest(path)
            _require_compatible(path, body, run_id, shapes)
            return build(path, body), skipped
        except DamagedError as damage:
            skipped.append(f"{path}: {damage}")
    return None, skipped


def _require_compatible(path: Path, body: Json, run_id: RunId, shapes: ShapeTable) -> None:
    if body["schema"] != SCHEMA:
        raise CheckpointError(
            f"{path} has format {body['schema']}, but this version reads {SCHEMA}; update murmuration"
        )
    if body["run_id"] != run_id:
        raise OtherRunError(f"{path} belongs to run {body['run_id'][:12]}, not {run_id[:12]}; choose another folder")
    if body["shapes"] != shapes.hash().hex():
        raise CheckpointError(f"{path} holds a model with other shapes; choose another folder or remove it")


def _read(folder: Path, body: Json, shapes: ShapeTable, rooms: Rooms) -> Checkpoint:
    return Checkpoint(
        run_id=body["run_id"],
        shapes=bytes.fromhex(body["shapes"]),
        round=body["round"],
        digest=bytes.fromhex(body["digest"]),
        chain=_read_chain(folder, body),
        anchor=_read_vector(folder, ANCHOR, body, shapes, rooms.get(WEIGHTS)),
        outer={slot: _read_outer(folder, slot, body, shapes, rooms.get(slot)) for slot in body["outer"]},
        inner=_read_inner(folder, body, shapes),
        inner_meta=body["inner_meta"],
    )


def _read_chain(folder: Path, body: Json) -> SavedChain:
    return SavedChain(body["chain"], read_file(folder / CHAIN, FileDigest(**body["files"][CHAIN])))


def _read_vector(folder: Path, file: str, body: Json, shapes: ShapeTable, room: Tensor | None = None) -> Tensor:
    return read_flat(_open(folder, file, body), {name: name for name in shapes.names}, shapes, room)


def _read_outer(folder: Path, slot: str, body: Json, shapes: ShapeTable, room: Tensor | None) -> Tensor:
    file = _open(folder, _outer_file(slot), body)
    if slot not in file.names:
        return read_flat(file, {name: name for name in shapes.names}, shapes, room)
    return file.read(slot)


def _read_inner(folder: Path, body: Json, shapes: ShapeTable) -> SavedInner:
    return SavedInner(_open(folder, INNER, body), body["inner"], shapes)


def _open(folder: Path, file: str, body: Json) -> TensorFile:
    return TensorFile(folder / file, FileDigest(**body["files"][file]))


def _outer_file(slot: str) -> str:
    return f"outer.{slot}.safetensors"


def _create_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _fsync_dir(folder.parent)


def _fsync_dir(folder: Path) -> None:
    """Sync a folder, so that its entries are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
