"""What a host serves: the page, the signed manifest, and the run as JSON, as events and as metrics. Read-only.

/api/v1/events is a stream of server-sent events. The id of each is the index of its event; who comes again with
Last-Event-ID (or ?after=INDEX) gets what follows it. Who comes anew, or too late, first gets the whole `state`.
Messages named `now` have no id: figures of the moment, at most twice a second.
"""

import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from node.host.figures import Figures
from node.host.page import STATIC, render
from node.host.recorder import Recorder, message_of, messages
from node.host.state import lanes_of
from node.host.views import MAX_POINTS, SERIES, history, one_series, snapshot, status
from protocol.errors import LimitError

PAUSE_SECONDS = 15.0  # between two signs of life on a quiet stream
USUAL_POINTS = 2000
ENDED = "the watch has ended: what is told stands still\n"
HOST = re.compile(r"^[A-Za-z0-9.\-]{1,253}(:\d{1,5})?$|^\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?$")
POLICY = "default-src 'none'; " + "; ".join(
    (
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True)
class Face:
    """`manifest`: the signed text of this moment; None where there is nothing to join, as in a replay.

    `public_url`: how others reach us, where that is not what their browser says. `watches`: whether news still come in.
    """

    recorder: Recorder
    manifest: Callable[[], Awaitable[bytes]] | None
    public_url: str | None = None
    clock: Callable[[], float] = time.time
    watches: Callable[[], bool] = lambda: True

    def values(self) -> dict[str, Any]:
        values = snapshot(self.recorder.state, self.clock())
        if self.manifest is None:
            values |= {"status": "replay", "tone": "busy", "reason": "an old run, as its host saw it"}
        return values

    def join_line(self, request: Request) -> str | None:
        host = request.headers.get("host", "")
        if self.manifest is None:
            return None
        base = self.public_url or (f"{request.url.scheme}://{host}" if HOST.match(host) else "http://HOST")
        return f"murmur join {base}/run.toml"


class Headers:
    """The same headers on every answer; nothing of the moment is kept by anyone in between."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        await self._app(scope, receive, with_headers)


class EventStream(StreamingResponse):
    """Ends with its connection; one whose other side does not read is ended by TCP (`node.web`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages = self.body_iterator
        try:
            with contextlib.suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            if isinstance(messages, AsyncGenerator):
                await messages.aclose()  # at once, not when it is collected: it counts as a listener until then


def application(face: Face) -> Starlette:
    figures = Figures(face.values)

    async def index(request: Request) -> Response:
        return HTMLResponse(render(face.values(), face.join_line(request), version("murmuration")))

    async def manifest(_: Request) -> Response:
        if face.manifest is None:
            raise HTTPException(404, "this is a replay: there is no run to join")
        return Response(await face.manifest(), media_type="application/toml")

    async def state(_: Request) -> Response:
        return JSONResponse(face.values())

    async def metrics(request: Request) -> Response:
        if not face.watches():  # a scrape that fails is told apart from figures that stand still
            return PlainTextResponse(ENDED, 503)
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(figures.registry), headers={"content-type": content_type})

    async def health(_: Request) -> Response:
        if not face.watches():
            return PlainTextResponse(ENDED, 503)
        return PlainTextResponse(f"ok {status(face.recorder.state)[0]}\n")

    routes = [
        Route("/", index),
        Route("/run.toml", manifest),
        Route("/api/v1/state", state),
        Route("/api/v1/history", partial(_history, face)),
        Route("/api/v1/timeline", partial(_timeline, face)),
        Route("/api/v1/events", partial(_events, face)),
        Route("/metrics", metrics),
        Route("/healthz", health),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Headers)])


async def _history(face: Face, request: Request) -> Response:
    maximum = min(MAX_POINTS, max(2, _whole(request, "max", USUAL_POINTS)))
    series = request.query_params.get("series")
    if series is None:
        return JSONResponse(history(face.recorder.state, maximum))
    if series not in SERIES:
        raise HTTPException(400, f"no such series; there are {', '.join(SERIES)}")
    return JSONResponse({"series": series, "points": one_series(face.recorder.state, series, maximum)})


async def _timeline(face: Face, request: Request) -> Response:
    number, lanes = lanes_of(face.recorder.state, _whole(request, "round", 0))
    return JSONResponse({"round": number, "lanes": [lane.model_dump() for lane in lanes]})


async def _events(face: Face, request: Request) -> Response:
    after = request.headers.get("last-event-id") or request.query_params.get("after")
    if after is not None and not re.fullmatch(r"\d{1,16}", after):
        raise HTTPException(400, "after: a whole number, the index of the last event that you have")
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return EventStream(_stream(face, after), media_type="text/event-stream", headers=headers)


async def _stream(face: Face, after: str | None) -> AsyncIterator[bytes]:
    """Listens first and looks then, with no wait between the two: no event falls between."""
    try:
        with face.recorder.listen() as listener:
            missed = None if after is None else face.recorder.since(int(after) + 1)
            if missed is None:
                last = face.recorder.state.index - 1
                yield message_of("state", face.values(), last if last >= 0 else None)
            else:
                yield b"".join([b"retry: 1000\n\n", *missed])
            async for message in messages(listener, PAUSE_SECONDS):
                yield message
    except LimitError:
        yield b"retry: 30000\n\n"


def _whole(request: Request, name: str, otherwise: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return otherwise
    if not re.fullmatch(r"\d{1,12}", text):
        raise HTTPException(400, f"{name}: a whole number")
    return int(text)
