"""Serve the newest model in a node's folder at /model of a host: a tar file of the Hugging Face folder.

`murmur export` makes the archive on demand, in a separate process and one at a time, so that the page stays fast and
the memory is freed. The archive is replaced when a newer round is requested, but while the run continues only after a
pause of ten times the seconds that the last one took. A download can be resumed (range requests): the entity tag names
the run and the round.
"""

import asyncio
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from node.model import shape_table
from node.paths import find_newest_model
from node.processes.workers import run_module
from protocol.errors import MurmurError, StorageError
from protocol.manifest.run import Manifest

FOLDER_NAME = "model"  # in the node's folder
PAUSE_FACTOR = 10.0  # seconds before the next archive per second that the last one took
MIN_EXPORT_SECONDS = 300.0  # the longest that an export may take, plus its bytes / MIN_BYTES_PER_SECOND
MIN_BYTES_PER_SECOND = 10_000_000
FLOAT_BYTES = 4
MAX_DOWNLOADS = 8
RETRY_SECONDS = 30
PATH = "/model"


@dataclass(frozen=True)
class ModelInfo:
    """The newest model: `size` is that of its weights in bytes."""

    round: int
    size: int
    is_final: bool


@dataclass(frozen=True)
class Archive:
    """A complete archive, by the time at which it was made and the seconds that took."""

    path: Path
    round: int
    made_at: float = 0.0
    seconds: float = 0.0


class ModelArchive:
    """Makes the archive of the newest model in the `folders` of nodes, and keeps it in the first of them.

    `is_final` returns whether a round is the run's last.
    """

    def __init__(self, folders: Sequence[Path], manifest: Manifest, is_final: Callable[[int], bool]) -> None:
        self._folders = tuple(folders)
        self._folder = folders[0] / FOLDER_NAME
        self.run_id = manifest.run_id
        self._name = manifest.run.name
        self._size = FLOAT_BYTES * shape_table(manifest.model).numel
        self._is_final = is_final
        self._archive: Archive | None = None
        self._lock = asyncio.Lock()

    def newest(self) -> ModelInfo | None:
        """Return the newest model on disk, None before the first."""
        newest = find_newest_model(self._folders)
        return ModelInfo(newest[0], self._size, self._is_final(newest[0])) if newest else None

    async def open(self) -> Archive | None:
        """Return an archive of the newest model, or of a recent one; None before the first.

        Raises StorageError if it cannot be made.
        """
        async with self._lock:
            newest = find_newest_model(self._folders)
            if newest is None:
                return None
            if self._archive is None or not self._is_good_enough(self._archive, newest[0]):
                began = time.monotonic()
                path, exported = await self._make(newest[1])
                self._archive = Archive(path, exported, time.monotonic(), time.monotonic() - began)
            return self._archive

    def _is_good_enough(self, archive: Archive, newest_round: int) -> bool:
        if not archive.path.exists():
            return False
        is_recent = time.monotonic() - archive.made_at < PAUSE_FACTOR * archive.seconds
        return archive.round == newest_round or (is_recent and not self._is_final(newest_round))

    async def _make(self, node_dir: Path) -> tuple[Path, int]:
        """Export the newest checkpoint of a node and pack it; return the archive and its round."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for old in self._folder.glob(".making-*"):  # of a process that was killed
                await asyncio.to_thread(shutil.rmtree, old)
            with tempfile.TemporaryDirectory(prefix=".making-", dir=self._folder) as staging:
                number = await self._export(node_dir, Path(staging) / "export")
                name = f"{self._name}-round-{number}"
                (Path(staging) / "export").rename(Path(staging) / name)
                packed = await asyncio.to_thread(_pack, Path(staging) / name)
                for old in self._folder.glob("*.tar"):
                    old.unlink()
                return packed.rename(self._folder / packed.name), number
        except OSError as error:
            raise StorageError(f"cannot write {self._folder}: {error.strerror}; free some space") from error

    async def _export(self, node_dir: Path, out: Path) -> int:
        """Run `murmur export`; return the round that it exported."""
        seconds = MIN_EXPORT_SECONDS + self._size / MIN_BYTES_PER_SECOND
        try:
            child = await run_module("node.cli", ["export", str(node_dir), str(out)], seconds)
        except TimeoutError as error:
            raise StorageError("the export of the model takes too long; the disk may be overloaded") from error
        if child.exit_code != 0:
            reason = child.last_error or "it was killed"
            raise StorageError(f"cannot export the model: {reason.removeprefix('murmur: ')}")
        found = re.search(rb"of round (\d+)", child.output)
        assert found is not None, "murmur export names the round"
        return int(found[1])


def model_values(archive: ModelArchive | None) -> dict[str, object]:
    """Return the JSON field `model` of the page: None if the host has no model."""
    newest = archive.newest() if archive else None
    return {"model": asdict(newest) if newest else None}


def _pack(folder: Path) -> Path:
    """Write a tar file of a folder next to it, without names of this machine's users; return the file."""
    packed = folder.parent / f"{folder.name}.tar"

    def anonymize(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() else 0o644
        return entry

    with tarfile.open(packed, "w") as archive:
        archive.add(folder, folder.name, filter=anonymize)
    return packed


class DownloadSlots:
    """Limits the downloads that run at the same time."""

    def __init__(self, free: int) -> None:
        self.free = free


class ModelResponse(FileResponse):
    """A file that takes a slot while it is sent."""

    slots: DownloadSlots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.slots.free -= 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.slots.free += 1


def model_route(archive: ModelArchive) -> Route:
    """Return the route of a host that has the model of the run."""
    slots = DownloadSlots(MAX_DOWNLOADS)

    async def model(request: Request) -> Response:
        if request.method == "HEAD":  # whether there is a model; making the archive takes long
            newest = archive.newest()
            return Response(
                status_code=200 if newest else 404, headers=_headers(archive, newest.round) if newest else {}
            )
        _require_slot(slots)
        try:
            made = await archive.open()
        except MurmurError as error:
            raise HTTPException(503, str(error), {"retry-after": str(RETRY_SECONDS)}) from error
        if made is None:
            raise HTTPException(404, "this host has no state of the run yet; try again after its first round")
        _require_slot(slots)
        headers = _headers(archive, made.round)
        response = ModelResponse(made.path, headers=headers, media_type="application/x-tar", filename=made.path.name)
        response.slots = slots
        return response

    return Route(PATH, model)


def _headers(archive: ModelArchive, number: int) -> dict[str, str]:
    return {"etag": f'"{archive.run_id[:16]}-{number}"', "murmur-round": str(number)}


def _require_slot(slots: DownloadSlots) -> None:
    if slots.free <= 0:
        raise HTTPException(503, "too many downloads at the same time", {"retry-after": str(RETRY_SECONDS)})
