"""Sampling text, token by token, from the newest checkpoint of a node.

The context slides: the model sees the last `context` tokens. Nothing is cached between tokens, which is fast enough to
try a model; to serve one, export it.
"""

import codecs
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from node.checkpoints.checkpoint import load_trained_weights
from node.data.tokenizer import load_tokenizer_file
from node.model.families import build_model
from node.model.interface import LanguageModel
from node.monitoring.logs import sanitize
from node.run_dir import tokenizer_path
from protocol.errors import UsageError
from protocol.manifest import Manifest

BYTE_VALUES = 256


class TextCodec(Protocol):
    """Converts between text and tokens; token ids are below `vocabulary_size`."""

    vocabulary_size: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield text as soon as it is certain; a piece may be empty."""


class ByteTextCodec:
    """The bytes of UTF-8 as tokens."""

    vocabulary_size = BYTE_VALUES

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield text once its bytes are complete."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        yield from (decoder.decode(bytes([token])) for token in tokens)
        yield decoder.decode(b"", final=True)


class TokenizerTextCodec:
    """A Hugging Face tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = load_tokenizer_file(path)
        self.vocabulary_size: int = self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield text once its tokens are complete."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        yield from (stream.step(self.tokenizer, token) or "" for token in tokens)


def generate(
    run_dir: Path,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Continue `prompt` with the newest checkpoint of the node in `run_dir`, and return pieces of text.

    Args:
        temperature: 0 always takes the most likely token.
        top_k: sample from the k most likely tokens only.

    Raises:
        UsageError, MissingFileError, DataError, CheckpointError: at the call, not while iterating.
    """
    if tokens < 1 or temperature < 0 or (top_k is not None and top_k < 1):
        raise UsageError("tokens and top_k must be at least 1, and the temperature at least 0")
    trained = load_trained_weights(run_dir)
    config = trained.manifest.model
    codec = _open_text_codec(run_dir, trained.manifest)
    model = build_model(config)
    model.load_flat(trained.anchor)
    start = codec.encode(prompt or "\n")  # the model needs at least one token to continue
    if not start:
        raise UsageError("the run's tokenizer turns this prompt into no tokens; use another prompt")
    usable = min(codec.vocabulary_size, config.vocabulary)
    if max(start) >= usable:
        raise UsageError(f"the prompt has tokens that this model of {usable} does not know; use another prompt")
    sampled = sample_tokens(model, start, temperature, top_k, seed, usable)
    return (sanitize(piece, "\n\t") for piece in codec.decode(itertools.islice(sampled, tokens)))


def sample_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    temperature: float,
    top_k: int | None,
    seed: int,
    vocabulary_size: int,
) -> Iterator[int]:
    """Yield tokens that continue `prompt` (at least one token), without end; equal seeds give equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    window = deque(prompt, maxlen=model.config.context)
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([list(window)]))[0, -1, :vocabulary_size]
        token = sample_token(logits, temperature, top_k, generator)
        window.append(token)
        yield token


def sample_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Sample one token from `logits` (vocabulary,)."""
    if temperature == 0:
        return int(logits.argmax())
    kept = logits.topk(min(top_k or len(logits), len(logits)))
    probabilities = torch.softmax(kept.values / temperature, dim=-1)
    return int(kept.indices[torch.multinomial(probabilities, 1, generator=generator)])


def _open_text_codec(run_dir: Path, manifest: Manifest) -> TextCodec:
    return TokenizerTextCodec(tokenizer_path(run_dir, manifest)) if manifest.data.tokenizer else ByteTextCodec()
