"""The host's web server: the page, the signed manifest, and the run as JSON, events and metrics. Read-only.

/api/v1/events is a stream of server-sent events. The id of a message is the index of its event; a client that
reconnects with Last-Event-ID (or ?after=INDEX) gets the events after it. A client that is new, or too far behind, first
gets the whole `state`. Messages named `now` have no id: they carry momentary figures, at most twice a second.

/metrics describes the whole swarm. It contains no text from peers, so its size does not depend on them.
"""

import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from node.daemon.receipts.receipt import ReceiptIssuer
from node.daemon.stored_states.model_archive import ModelArchive, model_route, model_values
from node.dashboard.event_log import EventLog, encode_message, stream_messages
from node.dashboard.host_report import CurrentReport, receipt_routes, report_routes
from node.dashboard.html_page import STATIC_DIR, render_page
from node.dashboard.json_views import MAX_POINTS, SERIES, history, run_status, series_points, snapshot
from node.dashboard.run_report import render_end
from node.dashboard.state import timings_of_round
from node.own_loops import join_line
from protocol.errors import LimitError
from protocol.manifest.run import Manifest

GAUGES = (
    ("murmur_swarm_round", "Rounds committed", "round"),
    ("murmur_swarm_loss", "Training loss of the last round, nats per token", "loss"),
    ("murmur_swarm_validation_loss", "Loss on held-out text, nats per token", "validation"),
    ("murmur_swarm_tokens_per_second", "Speed of all peers together", "tokens_per_second"),
    ("murmur_swarm_round_seconds", "Mean seconds per round", "round_seconds"),
    ("murmur_swarm_send_bytes_per_second", "Bytes per second sent by all peers", "sending"),
    ("murmur_swarm_progress", "Progress towards the target, from 0 to 1", "progress"),
    ("murmur_swarm_missing_rounds", "Rounds that the host could not fetch", "missing"),
)


class SwarmCollector(Collector):
    """Builds the swarm's metrics at each scrape from `values`, which returns `json_views.snapshot`."""

    def __init__(self, values: Callable[[], Mapping[str, Any]]) -> None:
        self._values = values
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the current state."""
        values = self._values()
        yield InfoMetricFamily("murmur_swarm", "The run", value={key: values.get(key, "") for key in ("run", "run_id")})
        yield CounterMetricFamily("murmur_swarm_tokens", "Tokens in all committed rounds", value=values["tokens"])
        for name, text, key in GAUGES:
            if values[key] is not None:
                yield GaugeMetricFamily(name, text, value=values[key])
        yield _peer_count_family(values)


def _peer_count_family(values: Mapping[str, Any]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("murmur_swarm_peers", "Peers by state", labels=["state"])
    counts = dict.fromkeys(("training", "paused", "starting", "resting", "late", "behind", "joining", "watching"), 0)
    for peer in values["peers"]:
        if peer["state"] in counts:
            counts[peer["state"]] += 1
    for state, count in counts.items():
        family.add_metric([state], count)
    return family


KEEPALIVE_SECONDS = 15.0  # between two comments on an idle stream
DEFAULT_POINTS = 2000
WATCHER_ENDED_TEXT = "the watcher has failed: the figures are no longer updated\n"
HOST_PATTERN = re.compile(r"^[A-Za-z0-9.\-]{1,253}(:\d{1,5})?$|^\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?$")
CONTENT_SECURITY_POLICY = "default-src 'none'; " + "; ".join(
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
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True)
class DashboardData:
    """The data that the server serves.

    Attributes:
        signed_manifest: returns the current signed text; `None` for a replay, which nobody can join.
        public_url: the URL for other people if it differs from the browser's Host header.
        is_live: returns whether the watcher still runs.
        receipts: `None` for a replay, which cannot sign any.
        model: `None` for a host that keeps no state.
    """

    event_log: EventLog
    signed_manifest: Callable[[], Awaitable[bytes]] | None
    public_url: str | None = None
    clock: Callable[[], float] = time.time
    is_live: Callable[[], bool] = lambda: True
    receipts: ReceiptIssuer | None = None
    model: ModelArchive | None = None
    manifest: Manifest | None = None  # says by which line people join

    def values(self) -> dict[str, Any]:
        """Return the snapshot of the current state."""
        values = {**snapshot(self.event_log.state, self.clock()), **model_values(self.model)}
        if self.signed_manifest is None:
            values |= {"status": "replay", "tone": "busy", "reason": "a recorded run, as its host saw it"}
        return values

    def line_to_join(self, request: Request) -> str | None:
        """Return the command to join with; `None` for a replay. An invalid Host header is not echoed."""
        host = request.headers.get("host", "")
        if self.signed_manifest is None:
            return None
        base = self.public_url or (f"{request.url.scheme}://{host}" if HOST_PATTERN.match(host) else "http://HOST")
        return join_line(f"{base}/run.toml", self.manifest)


class SecurityHeadersMiddleware:
    """Adds the security headers to every response, and keeps caches from storing current figures."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        await self._app(scope, receive, with_headers)


class EventStreamResponse(StreamingResponse):
    """A stream that ends with its connection; TCP ends it if the client does not read (node.monitoring.http_server)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages = self.body_iterator
        try:
            with contextlib.suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            if isinstance(messages, AsyncGenerator):
                await messages.aclose()  # now, not at garbage collection: it counts as a subscriber until then


def build_app(data: DashboardData) -> Starlette:
    """Return the web application."""
    collector, report = SwarmCollector(data.values), CurrentReport(data.event_log)

    async def index(request: Request) -> Response:
        values = data.values()
        end = render_end(report.get_if_over(), values, has_receipts=data.receipts is not None)
        return HTMLResponse(render_page(values, data.line_to_join(request), version("murmuration"), end))

    async def manifest(_: Request) -> Response:
        if data.signed_manifest is None:
            raise HTTPException(404, "this is a replay: there is no run to join")
        return Response(await data.signed_manifest(), media_type="application/toml")

    async def state(_: Request) -> Response:
        return JSONResponse(data.values())

    async def metrics(request: Request) -> Response:
        if not data.is_live():  # a failed scrape is visible, stale figures are not
            return PlainTextResponse(WATCHER_ENDED_TEXT, 503)
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(collector.registry), headers={"content-type": content_type})

    async def health(_: Request) -> Response:
        if not data.is_live():
            return PlainTextResponse(WATCHER_ENDED_TEXT, 503)
        return PlainTextResponse(f"ok {run_status(data.event_log.state)[0]}\n")

    routes = [
        Route("/", index),
        Route("/run.toml", manifest),
        Route("/api/v1/state", state),
        Route("/api/v1/history", partial(_history_response, data)),
        Route("/api/v1/timeline", partial(_timeline_response, data)),
        Route("/api/v1/events", partial(_events_response, data)),
        Route("/metrics", metrics),
        Route("/healthz", health),
        Mount("/static", StaticFiles(directory=STATIC_DIR)),
        *report_routes(report),
        *(receipt_routes(data.receipts) if data.receipts else ()),
        *([model_route(data.model)] if data.model else ()),
    ]
    return Starlette(routes=routes, middleware=[Middleware(SecurityHeadersMiddleware)])


async def _history_response(data: DashboardData, request: Request) -> Response:
    maximum = min(MAX_POINTS, max(2, _parse_whole_number(request, "max", DEFAULT_POINTS)))
    series = request.query_params.get("series")
    if series is None:
        return JSONResponse(history(data.event_log.state, maximum))
    if series not in SERIES:
        raise HTTPException(400, f"unknown series; choose one of {', '.join(SERIES)}")
    return JSONResponse({"series": series, "points": series_points(data.event_log.state, series, maximum)})


async def _timeline_response(data: DashboardData, request: Request) -> Response:
    round_number, lanes = timings_of_round(data.event_log.state, _parse_whole_number(request, "round", 0))
    return JSONResponse({"round": round_number, "lanes": [lane.model_dump() for lane in lanes]})


async def _events_response(data: DashboardData, request: Request) -> Response:
    after = request.headers.get("last-event-id") or request.query_params.get("after")
    if after is not None and not re.fullmatch(r"\d{1,16}", after):
        raise HTTPException(400, "`after` must be a whole number, the index of the last event that you have")
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return EventStreamResponse(_stream_events(data, after), media_type="text/event-stream", headers=headers)


async def _stream_events(data: DashboardData, after: str | None) -> AsyncIterator[bytes]:
    """Subscribe, then read the state without awaiting in between, so that no event is lost."""
    try:
        with data.event_log.subscribe() as subscriber:
            missed = None if after is None else data.event_log.messages_since(int(after) + 1)
            if missed is None:
                last = data.event_log.state.index - 1
                yield encode_message("state", data.values(), last if last >= 0 else None)
            else:
                yield b"".join([b"retry: 1000\n\n", *missed])
            async for message in stream_messages(subscriber, KEEPALIVE_SECONDS):
                yield message
    except LimitError:
        yield b"retry: 30000\n\n"


def _parse_whole_number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,12}", text):
        raise HTTPException(400, f"`{name}` must be a whole number")
    return int(text)
