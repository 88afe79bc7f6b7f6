"""The dashboard's web server over real sockets."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import psutil
import pytest

from node.dashboard import server as module
from node.dashboard.event_log import MAX_QUEUED_MESSAGES, EventLog
from node.dashboard.server import SECURITY_HEADERS, DashboardData, build_app
from node.dashboard.state import RunState
from node.monitoring import http_server
from node.monitoring.http_server import open_listener, serve
from tests.node.dashboard.example_events import NAMES, apply_all, committed, joined, opening_events, timed

pytestmark = pytest.mark.slow

RUN = [*opening_events(), *map(committed, range(20)), timed(18)]


async def the_manifest() -> bytes:
    return b"[run]\n"


@contextlib.asynccontextmanager
async def served(data: DashboardData) -> AsyncIterator[httpx2.AsyncClient]:
    listener = open_listener("127.0.0.1", 0, "--http")
    async with (
        serve(build_app(data), listener, 64) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client,
    ):
        yield client


def make_data(**values: Any) -> DashboardData:
    return DashboardData(EventLog(None, RUN), the_manifest, **values)


async def test_every_response_has_the_security_headers() -> None:
    async with served(make_data()) as client:
        for path in ("/", "/run.toml", "/api/v1/state", "/healthz", "/metrics", "/static/page.js", "/nowhere"):
            answer = await client.get(path)
            assert answer.status_code == (404 if path == "/nowhere" else 200), path
            assert {key: answer.headers[key] for key in SECURITY_HEADERS} == SECURITY_HEADERS, path
        assert (await client.post("/api/v1/state")).status_code == 405
        assert (await client.get("/static/../server.py")).status_code == 404
        assert (await client.get("/static/%2e%2e/index.html")).status_code == 404


async def test_page_shows_the_join_command() -> None:
    async with served(make_data()) as client:
        port = client.base_url.port
        assert f"murmur join http://127.0.0.1:{port}/run.toml" in (await client.get("/")).text
        strange = await client.get("/", headers={"host": 'evil"><script>'})
        assert "evil" not in strange.text
        assert (await client.get("/run.toml")).content == b"[run]\n"
    async with served(make_data(public_url="https://run.example.org")) as client:
        assert "murmur join https://run.example.org/run.toml" in (await client.get("/")).text


async def test_state_history_and_timeline() -> None:
    async with served(make_data()) as client:
        state = (await client.get("/api/v1/state")).json()
        assert {"run", "round", "tokens", "loss", "peers"} <= state.keys() and state["round"] == 20
        columns = (await client.get("/api/v1/history")).json()
        assert columns["round"] == list(range(20))
        points = (await client.get("/api/v1/history?series=loss&max=5")).json()["points"]
        assert len(points) <= 5 and points[-1] == [19, 3.0]
        assert len((await client.get("/api/v1/timeline?round=18")).json()["lanes"]) == 2
        assert (await client.get("/healthz")).text == "ok training\n"
        metrics = (await client.get("/metrics")).text
        assert "murmur_swarm_round 20.0" in metrics and 'murmur_swarm_peers{state="' in metrics


async def test_page_of_a_failed_watcher_is_unhealthy() -> None:
    watches = True
    async with served(make_data(is_live=lambda: watches)) as client:
        for path in ("/healthz", "/metrics"):
            watches = True
            assert (await client.get(path)).status_code == 200
            watches = False
            answer = await client.get(path)
            assert answer.status_code == 503 and "no longer updated" in answer.text


@pytest.mark.parametrize(
    "path",
    ["/api/v1/history?series=none", "/api/v1/history?max=x", "/api/v1/timeline?round=-1", "/api/v1/events?after=1e9"],
)
async def test_invalid_parameters_are_refused(path: str) -> None:
    async with served(make_data()) as client:
        assert (await client.get(path)).status_code == 400


async def test_replay_has_no_manifest_and_no_join_command() -> None:
    async with served(DashboardData(EventLog(None, RUN), None)) as client:
        assert (await client.get("/run.toml")).status_code == 404
        assert (await client.get("/api/v1/state")).json()["status"] == "replay"


StreamMessage = tuple[int | None, str, dict[str, Any]]


async def read_messages(lines: AsyncIterator[str], count: int) -> list[StreamMessage]:
    """Return the next messages of a stream: index, name, values."""
    found: list[StreamMessage] = []
    values: dict[str, str] = {}
    async with asyncio.timeout(10):
        while len(found) < count:
            line = await anext(lines)
            if line == "" and "data" in values:
                index = int(values["id"]) if "id" in values else None
                found.append((index, values["event"], json.loads(values["data"])))
            if line == "":
                values = {}
            elif not line.startswith(":"):
                key, _, value = line.partition(": ")
                values[key] = value
    return found


async def test_broken_stream_resumes_where_it_stopped() -> None:
    """Control: a client that names no index gets the whole state."""
    data = make_data()
    async with served(data) as client:
        async with client.stream("GET", "/api/v1/events?after=20") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            assert [(index, name) for index, name, _ in await read_messages(lines, 3)] == [
                (21, "committed"), (22, "committed"), (23, "timed")
            ]  # fmt: skip
            data.event_log.record(committed(20))
            ((index, name, values),) = await read_messages(lines, 1)
            assert (index, name, values["round"]) == (24, "committed", 20)
        data.event_log.record(committed(21))
        data.event_log.record(joined(NAMES[2]))
        async with client.stream("GET", "/api/v1/events", headers={"last-event-id": "24"}) as stream:
            assert [index for index, _, _ in await read_messages(stream.aiter_lines(), 2)] == [25, 26]
        async with client.stream("GET", "/api/v1/events") as stream:
            ((index, name, values),) = await read_messages(stream.aiter_lines(), 1)
            assert (index, name) == (26, "state") and values["round"] == 22 and values["index"] == 27
        async with client.stream("GET", "/api/v1/events?after=99999") as stream:
            assert (await read_messages(stream.aiter_lines(), 1))[0][1] == "state"


async def test_events_alone_rebuild_the_state() -> None:
    data = DashboardData(EventLog(None), the_manifest)
    async with served(data) as client, client.stream("GET", "/api/v1/events") as stream:
        lines = stream.aiter_lines()
        await read_messages(lines, 1)
        for event in RUN:
            data.event_log.record(event)
        received = await read_messages(lines, len(RUN))
    assert [index for index, _, _ in received] == list(range(len(RUN)))
    assert apply_all(RUN, RunState()) == data.event_log.state


def accepted(port: int | None) -> set[int]:
    """Return the client ports of the connections that the server still holds."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {found.raddr.port for found in connections if found.laddr.port == port and found.raddr}


async def test_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscriber's limit ends its messages; TCP's timeout ends its connection and stream."""
    monkeypatch.setattr(http_server, "WRITE_SECONDS", 0.5)
    data, ended, stream = make_data(), asyncio.Event(), module._stream_events

    async def stream_and_note(data: DashboardData, after: str | None) -> AsyncIterator[bytes]:
        try:
            async for message in stream(data, after):
                yield message
        finally:
            ended.set()

    monkeypatch.setattr(module, "_stream_events", stream_and_note)
    async with served(data) as client:
        reader = socket.create_connection(("127.0.0.1", client.base_url.port or 0))
        reader.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: here\r\n\r\n")
        async with asyncio.timeout(30):
            while not data.event_log.subscriber_count:
                await asyncio.sleep(0.01)
            while data.event_log.subscriber_count:  # kernel buffers take some megabytes before a write has to wait
                for _ in range(MAX_QUEUED_MESSAGES // 4):
                    data.event_log.broadcast("now", {"text": "x" * 50_000})
                await asyncio.sleep(0.05)
            await ended.wait()
            while reader.getsockname()[1] in accepted(client.base_url.port):
                await asyncio.sleep(0.05)
        assert (await client.get("/healthz")).status_code == 200
        reader.close()


async def test_closed_connection_ends_its_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEPALIVE_SECONDS", 0.05)
    data = make_data()
    async with served(data) as client:
        async with client.stream("GET", "/api/v1/events") as stream:
            await read_messages(stream.aiter_lines(), 1)
            assert data.event_log.subscriber_count == 1
        async with asyncio.timeout(10):
            while data.event_log.subscriber_count:
                await asyncio.sleep(0.01)
