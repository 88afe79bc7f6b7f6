"""Conversations as token ids: the chat template of a run, and which tokens are answers.

A conversation is a list of messages, each with a `role` and a `content`. A template of Hugging Face, in Jinja, makes
one text of them. It is somebody else's program, so it runs in a sandbox: it reaches no attributes of Python objects,
changes no values, and writes a bounded text. No template sees the clock, so that all peers read the same ids.

Answers are what the assistant says, with the token that ends it. A template that marks them with `{% generation %}`
decides by itself. Any other is asked twice for each answer: the text up to it, with the words that ask for an answer,
must be the beginning of the text that ends with it; the rest of that is the answer. Some templates rewrite earlier
messages, such as those that leave out former thoughts; of these only the answers that stay as they were count.

A token that is read and not learned has the bit `UNCOUNTED`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from node.data.corpus import UNCOUNTED, Shard
from node.data.skipped_rows import Fault
from node.data.tokenizer import TextTokenizer, open_tokenizer
from protocol.errors import DataError, MissingFileError
from protocol.fault_words import shorten
from protocol.manifest.sections import MAX_TEMPLATE_CHARACTERS, ChatSection, DataSection

Message = Mapping[str, Any]
ASSISTANT: Final = "assistant"
CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # of runs that name no other template
LONG_TALK: Final = 2 * ({"role": "user", "content": "Well?"}, {"role": ASSISTANT, "content": "Yes."})
MAX_CHARACTERS: Final = 2**24  # of one conversation
TEMPLATE_FILES: Final = ("chat_template.jinja", "tokenizer_config.json")
OTHER_NAMES: Final = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT}  # of data sets with `from` and `value`
OPEN, CLOSE = "\ue000", "\ue001"  # around an answer in a text that is being made; no character of a conversation


class Rendered(NamedTuple):
    """The text of a conversation, and the places of its answers, in characters."""

    text: str
    answers: tuple[tuple[int, int], ...]


class _Generation(Extension):
    """Mark the text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a call that adds the marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _refuse(reason: object) -> None:
    raise TemplateError(str(reason))


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """The template of a run, which makes one text of a conversation. Raises DataError, one line, if it is none."""

    def __init__(self, chat: ChatSection) -> None:
        self._values = {"bos_token": chat.bos, "eos_token": chat.eos}
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self.text = chat.template or CHATML
        try:
            self._template = environment.from_string(self.text)
        except (TemplateError, RecursionError) as error:
            raise DataError(f"data.chat.template: {_reason(error)}; copy the whole template") from error

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Return the text of a conversation and its answers. Raises DataError, one line."""
        marked = self._render(messages)
        if OPEN in marked:
            return _take_marks(marked)
        return Rendered(marked, tuple(self._find_answers(messages, marked)))

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text that asks for the next answer. Raises DataError, one line."""
        return _take_marks(self._render(messages, asks=True)).text

    @cached_property
    def end_of_answer(self) -> str:
        """Return the text that follows an answer, such as `<|im_end|>`; empty if the template has none."""
        talk = LONG_TALK[:2]
        return self.render(talk).text.rpartition(talk[1]["content"])[2].strip()

    def _find_answers(self, messages: Sequence[Message], text: str) -> Iterator[tuple[int, int]]:
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before, after = self._render(messages[:number], asks=True), self._render(messages[: number + 1])
            if number + 1 < len(messages):  # some templates write it behind the last message alone
                after = after.removesuffix(self._values["eos_token"])
            if text.startswith(after) and after.startswith(before) and len(before) < len(after):
                yield len(before), len(after)

    def _render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        pieces, size = list[str](), 0
        try:
            for piece in self._template.generate(messages=messages, add_generation_prompt=asks, **self._values):
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise SecurityError("it makes too much text")
                pieces.append(piece)
        except (TemplateError, RecursionError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise DataError(f"data.chat.template cannot show a conversation: {_reason(error)}") from error
        return "".join(pieces)


def _reason(error: BaseException) -> str:
    return shorten(str(error).splitlines()[0] if str(error) else type(error).__name__, 150)


def _take_marks(marked: str) -> Rendered:
    """Return the text without marks, and the places that were marked."""
    pieces, places, size = list[str](), list[tuple[int, int]](), 0
    for number, part in enumerate(marked.split(OPEN)):
        answer, _, rest = part.partition(CLOSE) if number else ("", "", part)
        if answer:
            places.append((size, size + len(answer)))
        pieces += [answer, rest]
        size += len(answer) + len(rest)
    return Rendered("".join(pieces), tuple(places))


class ChatEncoder:
    """The tokenizer of a run whose texts are conversations, each as one line of JSON."""

    def __init__(self, chat: ChatSection, tokenizer: TextTokenizer) -> None:
        self.template, self.tokenizer = ChatTemplate(chat), tokenizer
        self.size, self.ids = tokenizer.size, tokenizer.ids
        self.end: Shard = tokenizer.end.astype(np.uint32) | np.uint32(UNCOUNTED)
        self._newest = "", Rendered("", ())  # of `find`, for `encode`

    def find(self, values: Mapping[str, Any], column: str) -> str | Fault:
        """Return the conversation in a column of a row as one line of JSON, or why there is none to learn from."""
        if column not in values:
            known = ", ".join(sorted(map(str, values)))
            return Fault("missing column", f"no column {column!r}; set data.column: {known}")
        try:
            messages = read_messages(values[column])
            text = json.dumps(messages, ensure_ascii=False)
            rendered = self.template.render(messages)
        except (ValueError, DataError) as error:
            return Fault("malformed row", f"{column!r} cannot be used: {error}")
        if not rendered.answers:
            return Fault("malformed row", f"the template shows no answer of {column!r} as it was given")
        self._newest = text, rendered
        return text

    def encode(self, text: str) -> Shard:
        """Return the token ids of a conversation, with the bit `UNCOUNTED` unless they are part of an answer.

        Raises DataError, one line, if the template refuses it.
        """
        newest, rendered = self._newest
        if newest != text:
            rendered = self.template.render(json.loads(text))
        ids, places = self.tokenizer.encode_with_places(rendered.text)
        counted = np.zeros(len(ids), dtype=bool)
        for start, stop in rendered.answers:
            counted |= (places[:, 0] < stop) & (places[:, 1] > start)
        return np.where(counted, ids, ids | np.uint32(UNCOUNTED)).astype(np.uint32)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids that ask for the next answer. Raises DataError, one line."""
        return [int(token) for token in self.tokenizer.encode_with_places(self.template.prompt(messages))[0]]


def open_encoder(data: DataSection, base: Path) -> TextTokenizer | ChatEncoder:
    """Open what makes tokens of the texts of a run: its tokenizer, of conversations with their template."""
    tokenizer = open_tokenizer(data.tokenizer, base)
    return tokenizer if data.chat is None else ChatEncoder(data.chat, tokenizer)


def read_messages(value: object) -> list[Message]:
    """Return the messages of a conversation. Raises ValueError, which says what is wrong."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise ValueError("it is not a list of messages")
    messages = [_read_message(each) for each in value]
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError("the assistant says nothing")
    return messages


def _read_message(value: object) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError("a message is not a table with role and content")
    kept = {str(key): each for key, each in value.items() if each is not None}
    if "role" not in kept and isinstance(kept.get("from"), str):
        kept = {"role": OTHER_NAMES.get(kept["from"], kept["from"]), "content": kept.get("value")}
    if not isinstance(kept.get("role"), str):
        raise ValueError("a message has no role")
    if not isinstance(kept.get("content"), str):
        raise ValueError("the content of a message is not text")
    if OPEN in kept["content"] or CLOSE in kept["content"]:
        raise ValueError("a message has a character of the private area U+E000")
    return kept


def find_template(folder: Path) -> ChatSection:
    """Return the template in a folder of Hugging Face, and its first and last token. Raises MissingFileError."""
    own, config = (folder / name for name in TEMPLATE_FILES)
    try:
        values = json.loads(config.read_bytes()) if config.is_file() else {}
        found = own.read_text(encoding="utf-8") if own.is_file() else values.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise MissingFileError(f"cannot read the chat template in {folder}: {_reason(error)}; repair it") from error
    if isinstance(found, list):  # several by name
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    if not isinstance(found, str) or not found.strip():
        raise MissingFileError(
            f"{folder} has no chat template; name a folder with {TEMPLATE_FILES[0]}, or leave it out"
        )
    if len(found) > MAX_TEMPLATE_CHARACTERS:
        raise DataError(f"the chat template in {folder} has more than {MAX_TEMPLATE_CHARACTERS} characters; shorten it")
    return ChatSection(template=found, bos=_token_of(values, "bos_token"), eos=_token_of(values, "eos_token"))


def _token_of(values: Mapping[str, Any], key: str) -> str:
    token = values.get(key)
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
