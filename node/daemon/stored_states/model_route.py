"""The path /model of a host's web server: the newest model as a tar file of a Hugging Face folder.

A download can be resumed (range requests): the entity tag names the run and the round.
"""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from node.daemon.stored_states.model_archive import ModelArchive
from protocol.errors import MurmurError

MAX_DOWNLOADS = 8
RETRY_SECONDS = 30
PATH = "/model"


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
