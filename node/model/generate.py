"""Sampling text from a model, for a batch of prompts at a time.

Each text is read once: the model keeps the keys and values of its tokens (`node.model.cache`), so the next token costs
one position. When a text has filled the context, its newest half is read again and the text goes on from there. A model
without a cache reads its whole window for each token and text; of ours that is a compiled one, whose program has one
size. `custom` models have no code here, so nothing generates with them.

Memory: the weights, the cache (`cache_bytes`) and the logits of one token of each text. `complete` takes as many
prompts at a time as fit into `CACHE_MEMORY`, and at least one.

A token is the maximum of logits plus noise (`optim.rollouts`), whose key is the seed and the number of the text.
So equal seeds give equal texts, whichever other prompts are in the batch.

Letters in comments: B texts, T tokens, V usable token ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from node.model.cache import KeyValueCache
from node.model.interface import LanguageModel
from node.model.opened_model import OpenedModel, open_folder
from node.monitoring.logs import sanitize
from optim.rollouts import gumbel_noise, noise_key, scores_of
from protocol.errors import CheckpointError, UsageError
from protocol.manifest.model import ModelSection

MIN_TEMPERATURE: Final = 1e-4  # below it, float32 has no room for the quotients, and the most likely token always wins
CACHE_MEMORY: Final = 1 << 30  # bytes of keys and values of all texts that are written together
READ_AT_ONCE: Final = 512  # tokens of each text; more take memory and are not faster


@dataclass(frozen=True)
class Sampling:
    """The rule by which tokens are drawn.

    Attributes:
        temperature: 0 always takes the most likely token.
        top_k: draw from the k most likely tokens only.
        top_p: draw from the most likely tokens that together have this probability.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def require_valid(self) -> None:
        """Raise UsageError unless tokens can be drawn so."""
        if not self.temperature >= 0 or (self.top_k is not None and self.top_k < 1):  # NaN is not at least 0
            raise UsageError("top_k must be at least 1, and the temperature at least 0")
        if not 0 < self.top_p <= 1:
            raise UsageError("top_p must be above 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is always taken."""
        return self.temperature < MIN_TEMPERATURE


class Sampled(NamedTuple):
    """A token of the text number `text`, and its log probability in nats at the temperature, before top_k and top_p."""

    text: int
    token: int
    log_probability: float


@dataclass
class Completion:
    """The tokens that continue a prompt; `stopped` unless it has as many as were wanted."""

    tokens: list[int]
    log_probabilities: list[float]
    stopped: bool = False


def generate(
    folder: Path,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    top_p: float = 1.0,
) -> Iterator[str]:
    """Continue `prompt` with the model in a folder (`open_folder`), and return pieces of text.

    Raises:
        UsageError, MissingFileError, DataError, CheckpointError: at the call, not while iterating.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    require_sampling(prompt, tokens, sampling)
    return continue_text(open_folder(folder), prompt, tokens, sampling)


def require_sampling(prompt: str, tokens: int, sampling: Sampling) -> None:
    """Raise UsageError unless text can be sampled so, before a model is opened."""
    if tokens < 1:
        raise UsageError("tokens must be at least 1")
    sampling.require_valid()
    if not prompt.isprintable() and any("\ud800" <= char <= "\udfff" for char in prompt):  # bytes that are not UTF-8
        raise UsageError("the prompt is not UTF-8 text; convert it, or type it in a UTF-8 terminal")


def continue_text(
    opened: OpenedModel, prompt: str, tokens: int, sampling: Sampling, device: torch.device | str = "cpu"
) -> Iterator[str]:
    """Continue `prompt` with an opened model until its document ends, by at most `tokens`; see `generate`."""
    return TextGenerator(opened, device).stream(prompt or "\n", tokens, sampling)  # the model needs a token to continue


class TextGenerator:
    """An opened model that writes text; it stops at the end of a document."""

    def __init__(self, opened: OpenedModel, device: torch.device | str = "cpu") -> None:
        self.tokenizer = opened.tokenizer
        self.config = opened.config
        self.model = opened.build(device)
        self.usable = usable_tokens(opened)
        self.stops = stop_tokens(opened)

    def encode(self, prompt: str) -> list[int]:
        """Encode a prompt. Raises UsageError if the model cannot continue it."""
        start: list[int] = self.tokenizer.encode(prompt).tolist()
        self.require_known(start)
        return start

    def require_known(self, start: Sequence[int]) -> None:
        """Raise UsageError unless the model can continue these tokens."""
        if not start:
            raise UsageError("the run's tokenizer turns this prompt into no tokens; use another prompt")
        if max(start) >= self.config.vocabulary:
            raise UsageError(
                f"the prompt has tokens that this model of {self.config.vocabulary} does not know; use another prompt"
            )

    def stream(self, prompt: str, tokens: int, sampling: Sampling) -> Iterator[str]:
        """Continue a prompt by pieces of text. Raises UsageError at the call."""
        return self.continue_tokens(self.encode(prompt), tokens, sampling)

    def continue_tokens(
        self, start: Sequence[int], tokens: int, sampling: Sampling, ends: Sequence[str] = ()
    ) -> Iterator[str]:
        """Continue tokens by pieces of text, up to the first of the texts `ends`."""
        sampled = sample_tokens(self.model, start, tokens, sampling, self.usable, self.stops)
        pieces = until(self.tokenizer.decode(sampled, after=start), ends)
        return (sanitize(piece, "\n\t") for piece in pieces)


def until(pieces: Iterable[str], ends: Sequence[str]) -> Iterator[str]:
    """Yield the text before the first of `ends`; a possible beginning of one waits for the pieces after it."""
    waiting = ""
    for piece in pieces:
        waiting += piece
        if found := [place for end in ends if (place := waiting.find(end)) >= 0]:
            yield waiting[: min(found)]
            return
        beginnings = (end[:size] for end in ends for size in range(1, len(end)))
        held = max((len(beginning) for beginning in beginnings if waiting.endswith(beginning)), default=0)
        yield waiting[: len(waiting) - held]
        waiting = waiting[len(waiting) - held :]
    yield waiting


def usable_tokens(opened: OpenedModel) -> Tensor:
    """Return the ids, int64, that are tokens and that the model knows."""
    ids = opened.tokenizer.ids
    return torch.from_numpy(ids[ids < opened.config.vocabulary])


def stop_tokens(opened: OpenedModel) -> frozenset[int]:
    """Return the tokens that end a document: the tokenizer's, and the model's own."""
    own = () if opened.config.document_end is None else (opened.config.document_end,)
    return frozenset((*opened.tokenizer.end.tolist(), *own))


def cache_bytes(config: ModelSection, texts: int, length: int) -> int:
    """Return the bytes of keys and values of texts of up to `length` tokens, in fp32."""
    slots = min(config.context, length)
    return 2 * 4 * config.layers * config.key_heads * config.head_width * texts * slots


def sample_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    usable: Tensor,
    stops: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Yield at most `tokens` that continue one prompt (at least one token); equal seeds give equal tokens."""
    for step in sample_batch(model, [prompt], tokens, sampling, usable, stops):
        yield step[0].token


def complete(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    usable: Tensor,
    stops: frozenset[int] = frozenset(),
    keys: Sequence[int] | None = None,
    keeps_stops: bool = False,
) -> list[Completion]:
    """Continue all prompts, as many at a time as fit the memory; see `sample_batch`."""
    keys = keys or _keys_of(sampling.seed, len(prompts))
    completions = [Completion([], []) for _ in prompts]
    longest = max(map(len, prompts), default=0) + tokens
    at_once = max(1, CACHE_MEMORY // cache_bytes(model.config, 1, longest))
    for first in range(0, len(prompts), at_once):
        part = slice(first, first + at_once)
        for step in sample_batch(model, prompts[part], tokens, sampling, usable, stops, keys[part], keeps_stops):
            for text, token, log_probability in step:
                completions[first + text].tokens.append(token)
                completions[first + text].log_probabilities.append(log_probability)
    for completion in completions:
        completion.stopped = len(completion.tokens) < tokens or completion.tokens[-1] in stops
    return completions


def sample_batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    usable: Tensor,
    stops: frozenset[int] = frozenset(),
    keys: Sequence[int] | None = None,
    keeps_stops: bool = False,
) -> Iterator[list[Sampled]]:
    """Yield for each position the next token of every text that goes on.

    Args:
        prompts: at least one token each; of a long one the last `context` tokens are read.
        tokens: the most for each text.
        usable: ids that are tokens, int64 and ascending; no other id is drawn.
        stops: a text ends before such a token.
        keys: of the noise of each text; made of the seed by default.
        keeps_stops: a text ends with its stop, which is one of its tokens, so that a model can learn to end.

    Raises CheckpointError if the model's output is not finite.
    """
    device = model.flat.device
    usable = usable.to(device)
    noise_keys = torch.tensor(keys or _keys_of(sampling.seed, len(prompts)), device=device)
    numbers = list(range(len(prompts)))
    window = _Window(model, prompts, tokens)
    logits = window.read()
    for position in range(tokens):
        places, log_probabilities = draw(logits[:, usable], sampling, noise_keys, position, usable)
        drawn = usable[places].tolist()
        going = [row for row, token in enumerate(drawn) if token not in stops]
        shown = range(len(drawn)) if keeps_stops else going
        if shown:
            yield [Sampled(numbers[row], drawn[row], log_probabilities[row]) for row in shown]
        if not going or position == tokens - 1:
            return
        if len(going) < len(drawn):
            numbers = [numbers[row] for row in going]
            noise_keys = noise_keys[going]
            window.keep(going)
        logits = window.append([drawn[row] for row in going])


def _keys_of(seed: int, count: int) -> list[int]:
    return [noise_key("text", seed, number) for number in range(count)]


def draw(logits: Tensor, sampling: Sampling, keys: Tensor, position: int, ids: Tensor) -> tuple[Tensor, list[float]]:
    """Draw one of `ids` for each row of logits (B, V); returns places in `ids` (B,) and log probabilities in nats.

    Raises CheckpointError if a logit is not finite.
    """
    if not logits.isfinite().all():
        raise CheckpointError("the model's output is not finite: its training diverged; use another checkpoint")
    if sampling.is_greedy:
        places = logits.argmax(dim=-1)
        return places, _log_probabilities(logits, places)
    noise = gumbel_noise(keys, torch.full_like(keys, position), ids)
    scores = scores_of(logits, sampling.temperature, noise)
    if sampling.top_k is not None or sampling.top_p < 1:
        scores = scores.masked_fill(~kept_tokens(logits / sampling.temperature, sampling), -torch.inf)
    places = scores.argmax(dim=-1)
    return places, _log_probabilities(logits / sampling.temperature, places)


def kept_tokens(logits: Tensor, sampling: Sampling) -> Tensor:
    """Mark the tokens of logits (B, V) that top_k and, of those, top_p leave; (B, V) bool."""
    count = logits.shape[1]
    values, order = logits.topk(min(sampling.top_k or count, count))
    shares = torch.softmax(values, dim=-1)
    kept = shares.cumsum(dim=-1) - shares < sampling.top_p
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, kept)


def _log_probabilities(logits: Tensor, places: Tensor) -> list[float]:
    chosen = logits.gather(1, places[:, None])[:, 0]
    found: list[float] = (chosen - logits.logsumexp(dim=-1)).tolist()
    return found


class _Window:
    """The texts of a batch as far as the model sees them: at most its context of each."""

    def __init__(self, model: LanguageModel, prompts: Iterable[Sequence[int]], tokens: int) -> None:
        self._model = model
        self._context = model.config.context
        self._texts = [list(prompt[-self._context :]) for prompt in prompts]
        self._remaining = tokens
        self._cache: KeyValueCache | None = None

    @torch.no_grad()
    def read(self) -> Tensor:
        """Read all texts from their beginning; returns the logits (B, vocabulary) after each."""
        longest = max(map(len, self._texts))
        device = self._model.flat.device
        padding = torch.tensor([longest - len(text) for text in self._texts], device=device)
        self._cache = None  # its memory is free before the next one takes its own
        self._cache = self._model.new_cache(padding, min(self._context, longest + self._remaining))
        if self._cache is None:
            return torch.cat([self._model.next_logits(torch.tensor([text], device=device)) for text in self._texts])
        padded = torch.tensor([[0] * (longest - len(text)) + text for text in self._texts], device=device)
        for piece in torch.split(padded, READ_AT_ONCE, dim=1):
            logits = self._model.next_logits(piece, self._cache)
        return logits

    @torch.no_grad()
    def append(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each text; returns the logits (B, vocabulary) after it."""
        self._remaining -= 1
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        full = [text for text in self._texts if len(text) > self._context]
        for text in full:
            del text[: -(self._context // 2)]
        if full or self._cache is None:
            return self.read()
        return self._model.next_logits(torch.tensor(tokens, device=self._model.flat.device)[:, None], self._cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all texts but these."""
        self._texts = [self._texts[row] for row in rows]
        if self._cache is not None:
            self._cache.keep_rows(torch.tensor(rows, device=self._model.flat.device))
