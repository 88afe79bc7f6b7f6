"""`murmur serve`: a plain HTTP client gets the texts that the model writes, and a reason where it gets none."""

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from node.commands import serving
from node.commands.chat import ChatModel
from node.commands.serving import MAX_BODY_BYTES, CompletionServer, build_server
from node.model.generate import Sampling, continue_text
from node.model.opened_model import open_folder
from node.monitoring.http_server import open_listener, serve
from tests.node.commands.test_chat import write_run

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 20}
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


@contextlib.contextmanager
def running(folder: Path, deadline: float = 60.0) -> Iterator[int]:
    """Serve the model of a folder in a thread; yield the port."""
    loop, begun, port = asyncio.new_event_loop(), threading.Event(), list[int]()
    ending = asyncio.Event()

    async def run() -> None:
        server = build_server(open_folder(folder), str(folder), deadline=deadline)
        async with serve(server.application, open_listener("127.0.0.1", 0, "--http"), 64) as bound:
            port.append(bound)
            begun.set()
            await ending.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert begun.wait(60)
    try:
        yield port[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(30)
        loop.close()


def post(port: int, path: str, body: dict[str, Any] | bytes, kind: str = "application/json") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, content, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read()


def choice_of(answer: tuple[int, bytes]) -> dict[str, Any]:
    status, body = answer
    assert status == 200, body
    (choice,) = json.loads(body)["choices"]
    assert isinstance(choice, dict)
    return choice


def test_texts_are_those_of_the_model_whole_and_by_pieces(tmp_path: Path) -> None:
    opened = open_folder(write_run(tmp_path))
    said = "".join(ChatModel.of(opened, str(tmp_path)).answer(HELLO["messages"], 20, Sampling(0.0)))
    text = "".join(continue_text(opened, "Once", 20, Sampling(0.0)))
    assert said and text
    with running(tmp_path) as port:
        whole = choice_of(post(port, CHAT, HELLO | GREEDY))
        assert (whole["message"]["content"], whole["finish_reason"]) == (said, "length")
        assert choice_of(post(port, TEXT, {"prompt": "Once", **GREEDY}))["text"] == text
        stopped = choice_of(post(port, TEXT, {"prompt": "Once", "stop": text[5:7], **GREEDY}))
        assert stopped["text"] == text[: text.find(text[5:7])]
        status, body = post(port, CHAT, HELLO | GREEDY | {"stream": True})
        *events, end = body.decode().strip().split("\n\n")
        assert (status, end) == (200, "data: [DONE]")
        parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert "".join(part["delta"]["content"] for part in parts) == said
        assert [part["finish_reason"] for part in parts[-2:]] == [None, "length"]


def test_calls_that_cannot_be_answered_get_a_reason(tmp_path: Path) -> None:
    with running(write_run(tmp_path, chat=False)) as port:
        assert choice_of(post(port, TEXT, {"prompt": "Once", **GREEDY}))["text"]
        for path, body, expected in (
            (CHAT, HELLO, "no chat template"),
            (TEXT, {"prompt": "Once", "logprobs": 5}, "logprobs"),
            (TEXT, {"prompt": "Once", "n": 2}, "n"),
            (TEXT, {"prompt": ["Once"]}, "prompt"),
            (TEXT, {}, "write a text"),
            (TEXT, b"{", "JSON"),
            (TEXT, b" " * (MAX_BODY_BYTES + 1), "at most"),
        ):
            status, reply = post(port, path, body)
            assert status == 400 and expected in json.loads(reply)["error"]["message"], reply
        assert post(port, TEXT, {"prompt": "Once"}, "text/plain")[0] == 400, "as a page of another origin would send it"


def test_late_and_superfluous_calls_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = {"prompt": "Once", "max_tokens": 50_000, "temperature": 0}
    with running(write_run(tmp_path), deadline=0.3) as port:
        assert post(port, TEXT, endless)[0] == 504
        assert b"was not written within" in post(port, TEXT, endless | {"stream": True})[1]
        assert choice_of(post(port, TEXT, endless | {"max_tokens": 2}))["text"], "the next call has its turn"
        monkeypatch.setattr(serving, "MAX_WAITING", 0)
        assert post(port, TEXT, endless)[0] == 503


async def call_at_once(server: CompletionServer, count: int, body: dict[str, Any], is_gone: bool = False) -> list[int]:
    """Make calls whose requests are read in one turn of the loop, as of a burst; returns their statuses in order."""
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST", "path": TEXT,
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    statuses = list[int]()

    async def call() -> None:
        bodies = [json.dumps(body).encode()]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            if not is_gone:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await server.application(dict(scope), receive, send)

    await asyncio.gather(*(call() for _ in range(count)))
    return sorted(statuses)


@pytest.mark.parametrize("streams", [False, True])
def test_burst_of_calls_keeps_the_limit_of_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.setattr(serving, "MAX_WAITING", 2)
    server = build_server(open_folder(write_run(tmp_path)), str(tmp_path), deadline=60.0)
    body = {"prompt": "Once", **GREEDY, "stream": streams}

    async def run() -> None:
        assert await call_at_once(server, 5, body) == [200, 200, 503, 503, 503]
        if streams:
            await call_at_once(server, 5, body, is_gone=True)
        assert await call_at_once(server, 2, body) == [200, 200], "a call that has ended keeps no place"

    asyncio.run(run())
