"""`murmur chat`: talk with a model in a terminal.

The chat template is that of the run (`data.chat`), or of the exported folder. The model answers as it was trained: from
the text that asks for an answer up to the text that ends one.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TextIO

import torch

from node.data.chat import ASSISTANT, ChatTemplate, Message, find_template
from node.model.generate import Sampling, TextGenerator
from node.model.opened_model import OpenedModel
from node.monitoring.logs import sanitize
from protocol.errors import DataError, UsageError

PROMPT: Final = "> "
FORGET: Final = "/new"
WELCOME: Final = f"Ctrl-C stops an answer, {FORGET} begins another conversation, Ctrl-D ends."


class ChatModel:
    """A model that answers messages."""

    def __init__(self, opened: OpenedModel, template: ChatTemplate, device: torch.device | str = "cpu") -> None:
        self.generator = TextGenerator(opened, device)
        self._template = template
        self.ends = [template.end_of_answer] if template.end_of_answer else []

    @classmethod
    def of(cls, opened: OpenedModel, source: str, device: torch.device | str = "cpu") -> "ChatModel":
        """Build the model that a user names. Raises UsageError or MissingFileError if it has no chat template."""
        if opened.run is None:
            return cls(opened, ChatTemplate(find_template(Path(source))), device)
        chat = opened.run.manifest.data.chat
        if chat is None:
            raise UsageError(
                "the run has no conversations ([data.chat]), so its model does not answer; use `murmur generate`"
            )
        return cls(opened, ChatTemplate(chat), device)

    def encode(self, messages: Sequence[Message], tokens: int) -> list[int]:
        """Encode the text that asks for the next answer of up to `tokens`.

        Raises DataError if the template refuses the messages, UsageError if they do not fit the context.
        """
        encoded, _ = self.generator.tokenizer.encode_with_places(self._template.prompt(messages))
        start: list[int] = encoded.tolist()
        self.generator.require_known(start)
        context = self.generator.config.context
        if len(start) > context - min(tokens, context // 2):
            raise UsageError(f"{len(start)} tokens do not fit the model's context of {context}; write less")
        return start

    def answer(self, messages: Sequence[Message], tokens: int, sampling: Sampling) -> Iterator[str]:
        """Answer the newest message by pieces of text. Raises DataError or UsageError at the call."""
        return self.generator.continue_tokens(self.encode(messages, tokens), tokens, sampling, self.ends)


@dataclass
class Conversation:
    """The messages so far; the oldest are forgotten once they do not fit the context."""

    model: ChatModel
    tokens: int
    sampling: Sampling
    system: str = ""
    messages: list[Message] = field(default_factory=list)
    answers: int = 0

    def ask(self, text: str) -> Iterator[str]:
        """Answer by pieces of text, and remember the answer as far as it was read. Raises UsageError or DataError."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        pieces = self._begin(messages)
        self.messages, self.answers = messages, self.answers + 1
        return self._remember(pieces)

    def _begin(self, messages: list[Message]) -> Iterator[str]:
        """Begin the answer, after the newest messages that fit."""
        sampling = replace(self.sampling, seed=self.sampling.seed + self.answers)  # equal questions, other answers
        opening = [{"role": "system", "content": self.system}] if self.system else []
        while True:
            try:
                return self.model.answer([*opening, *messages], self.tokens, sampling)
            except UsageError:
                if len(messages) < 3:
                    raise
                del messages[:2]

    def _remember(self, pieces: Iterator[str]) -> Iterator[str]:
        said = ""
        try:
            for piece in pieces:
                said += piece
                yield piece
        finally:
            self.messages.append({"role": ASSISTANT, "content": said})

    def forget(self) -> None:
        """Begin another conversation."""
        self.messages.clear()


def talk(conversation: Conversation, lines: Iterator[str], out: TextIO) -> None:
    """Answer line by line. Ctrl-C ends an answer, and without one the conversation."""
    for line in lines:
        text = line.strip()
        if text == FORGET:
            conversation.forget()
        elif text:
            try:
                with contextlib.suppress(KeyboardInterrupt):  # also before the first piece
                    _print_answer(conversation, text, out)
            except (UsageError, DataError) as error:
                print(f"murmur: {sanitize(str(error))}", file=sys.stderr, flush=True)
            else:
                out.write("\n")
                out.flush()


def _print_answer(conversation: Conversation, text: str, out: TextIO) -> None:
    with contextlib.closing(conversation.ask(text)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            out.write(piece)
            out.flush()


def read_lines() -> Iterator[str]:
    """Yield the lines that a person types, or those of a file; Ctrl-C and Ctrl-D end them."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and keys to edit with
    print(WELCOME)
    while True:
        try:
            yield input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return


def chat(source: str, opened: OpenedModel, system: str, tokens: int, sampling: Sampling, device: torch.device) -> None:
    """Answer line by line until the input ends. Raises MurmurError, one line."""
    talk(Conversation(ChatModel.of(opened, source, device), tokens, sampling, system), read_lines(), sys.stdout)
