"""`murmur serve`: the calls of OpenAI for completions and conversations, answered by one model over HTTP.

One answer is written at a time, in a thread of its own; a few others wait, and further ones are refused with 503. Each
call has a deadline. Options that would change the answer and are not known are refused by name. Only requests with the
content type of JSON are read, which pages of other origins cannot send from a browser on this machine.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from node.commands.chat import ChatModel
from node.model.generate import Sampling, TextGenerator, sample_tokens, until
from node.model.opened_model import OpenedModel
from node.monitoring.http_server import open_listener, serve
from node.monitoring.logs import sanitize
from node.units import parse_host_port
from protocol.errors import DataError, LimitError, MissingFileError, UsageError
from protocol.fault_words import describe_faults

MAX_BODY_BYTES: Final = 1 << 20
MAX_CONNECTIONS: Final = 64
MAX_WAITING: Final = 16  # calls, the one that is answered among them
DEADLINE_SECONDS: Final = 300.0  # of one call, with its wait
MAX_TOKENS: Final = 1 << 16
DEFAULT_TOKENS: Final = 256


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Call(_Body):
    """A request for text. `user` and the penalties of 0 mean nothing, and clients send them."""

    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = Field(default=None, max_length=1000)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: str | tuple[str, ...] = ()
    stream: bool = False
    n: Literal[1] = 1
    user: str = ""
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0

    @property
    def tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or DEFAULT_TOKENS

    @property
    def stops(self) -> list[str]:
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]


@dataclass
class WrittenAnswer:
    """An answer while it is written; `written` counts its tokens."""

    pieces: Iterator[str]
    prompt_tokens: int
    most: int
    written: int = 0

    @property
    def finish_reason(self) -> str:
        return "length" if self.written >= self.most else "stop"

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.written
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.written, "total_tokens": total}


class StreamedAnswer(StreamingResponse):
    """An answer by pieces. Its call keeps its place until the last piece is sent or the client is gone."""

    def __init__(self, pieces: AsyncGenerator[str], place: contextlib.ExitStack) -> None:
        super().__init__(pieces, media_type="text/event-stream")
        self._pieces = pieces
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            async with contextlib.aclosing(self._pieces):  # the next call has its turn at once
                await super().__call__(scope, receive, send)


class CompletionServer:
    """The routes of one model. `chat` is `None` for a model without a chat template."""

    def __init__(self, generator: TextGenerator, chat: ChatModel | None, name: str, deadline: float) -> None:
        self._generator = generator
        self._chat = chat
        self._name = name
        self._deadline = deadline
        self._numbers = count(1)
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self.application = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", partial(self._handle, is_chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self._handle, is_chat=True), methods=["POST"]),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "murmur"}]})

    async def _handle(self, request: Request, is_chat: bool) -> Response:
        try:
            call = await _read_call(request)
            with contextlib.ExitStack() as place:
                place.enter_context(self._take_place())
                answer = self._begin(call, is_chat)
                if call.stream:
                    return StreamedAnswer(self._stream(answer, is_chat), place.pop_all())
                text = "".join([piece async for piece in self._write(answer)])
        except (UsageError, DataError) as error:
            return _refuse(400, str(error))
        except LimitError as error:
            return _refuse(503, str(error))
        except TimeoutError:
            return _refuse(504, f"no answer within {self._deadline:g} s; ask for fewer tokens")
        return JSONResponse(self._reply(is_chat, False, text, answer.finish_reason) | {"usage": answer.usage})

    @contextlib.contextmanager
    def _take_place(self) -> Iterator[None]:
        """Count a call among those that wait, from before its prompt is encoded. Raises LimitError."""
        if self._waiting >= MAX_WAITING:
            raise LimitError(f"{MAX_WAITING} calls wait already; try again later")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _begin(self, call: Call, is_chat: bool) -> WrittenAnswer:
        """Encode the prompt. Raises UsageError or DataError if the model cannot answer it."""
        ends = call.stops
        if is_chat:
            if self._chat is None:
                raise UsageError("the model has no chat template; call /v1/completions")
            if not call.messages:
                raise UsageError("messages: write at least one")
            start = self._chat.encode(
                [{"role": each.role, "content": each.content} for each in call.messages], call.tokens
            )
            ends = [*ends, *self._chat.ends]
        elif call.prompt is None:
            raise UsageError("prompt: write a text; lists are not supported")
        else:
            start = self._generator.encode(call.prompt or "\n")
        sampling = Sampling(call.temperature, None, call.top_p, next(self._numbers) if call.seed is None else call.seed)
        answer = WrittenAnswer(iter(()), len(start), call.tokens)
        answer.pieces = self._generate(start, sampling, ends, answer)
        return answer

    def _generate(
        self, start: Sequence[int], sampling: Sampling, ends: Sequence[str], answer: WrittenAnswer
    ) -> Iterator[str]:
        source = self._generator

        def counted() -> Iterator[int]:
            for token in sample_tokens(source.model, start, answer.most, sampling, source.usable, source.stops):
                answer.written += 1
                yield token

        for piece in until(source.tokenizer.decode(counted(), after=start), ends):
            yield sanitize(piece, "\n\t")

    async def _write(self, answer: WrittenAnswer) -> AsyncGenerator[str]:
        """Yield the pieces of an answer in its turn. Raises TimeoutError at the deadline."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._deadline), self._turn:
                while (piece := await loop.run_in_executor(self._thread, next, answer.pieces, None)) is not None:
                    if piece:
                        yield piece
        finally:
            self._thread.submit(_close, answer.pieces)  # after a piece that is still being written

    async def _stream(self, answer: WrittenAnswer, is_chat: bool) -> AsyncGenerator[str]:
        try:
            async with contextlib.aclosing(self._write(answer)) as pieces:
                async for piece in pieces:
                    yield _event(self._reply(is_chat, True, piece, None))
        except TimeoutError:
            yield _event(_error(f"the answer was not written within {self._deadline:g} s"))
        else:
            yield _event(self._reply(is_chat, True, "", answer.finish_reason))
        yield "data: [DONE]\n\n"

    def _reply(self, is_chat: bool, is_part: bool, text: str, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if is_part else "chat.completion"
            choice["delta" if is_part else "message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {"id": "murmur", "object": kind, "created": int(time.time()), "model": self._name, "choices": [choice]}


async def _read_call(request: Request) -> Call:
    """Read the body of a call. Raises UsageError."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise UsageError("send the content type application/json")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise UsageError(f"a call has at most {MAX_BODY_BYTES} bytes")
    try:
        return Call.model_validate_json(body)
    except ValidationError as error:
        raise UsageError(describe_faults(error)) from error


def _close(pieces: Iterator[str]) -> None:
    pieces.close()  # type: ignore[attr-defined]


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"


def _error(text: str) -> dict[str, Any]:
    return {"error": {"message": sanitize(text), "type": "murmur"}}


def _refuse(status: int, text: str) -> Response:
    return JSONResponse(_error(text), status)


def build_server(
    opened: OpenedModel, source: str, device: torch.device | str = "cpu", deadline: float = DEADLINE_SECONDS
) -> CompletionServer:
    """Build the server of a model, with conversations if it has a chat template."""
    name = Path(source).name or source
    try:
        chat = ChatModel.of(opened, source, device)
    except (UsageError, MissingFileError):
        return CompletionServer(TextGenerator(opened, device), None, name, deadline)
    return CompletionServer(chat.generator, chat, name, deadline)


async def run_server(server: CompletionServer, address: str) -> None:
    """Answer calls until cancelled. Raises UsageError if the address cannot be used."""
    host, port = parse_host_port(address, "--http")
    async with serve(server.application, open_listener(host, port, "--http"), MAX_CONNECTIONS) as bound:
        print(f"http://{f'[{host}]' if ':' in host else host}:{bound}/v1 answers; Ctrl-C ends it", flush=True)
        await asyncio.Event().wait()
