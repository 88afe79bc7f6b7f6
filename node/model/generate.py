"""Sampling text, token by token, from a model.

The context slides: the model sees the last `context` tokens. Nothing is cached between tokens, which is fast enough to
try a model; to serve one, export it.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from node.model.interface import LanguageModel
from node.model.opened_model import OpenedModel, open_folder
from node.monitoring.logs import sanitize
from protocol.errors import CheckpointError, UsageError

MIN_TEMPERATURE = 1e-4  # below it, float32 has no room for the quotients, and the most likely token always wins


def generate(
    folder: Path,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Continue `prompt` with the model in a folder (`open_folder`), and return pieces of text.

    Args:
        temperature: 0 always takes the most likely token.
        top_k: sample from the k most likely tokens only.

    Raises:
        UsageError, MissingFileError, DataError, CheckpointError: at the call, not while iterating.
    """
    require_sampling(prompt, tokens, temperature, top_k)
    return continue_text(open_folder(folder), prompt, tokens, temperature, top_k, seed)


def require_sampling(prompt: str, tokens: int, temperature: float, top_k: int | None) -> None:
    """Raise UsageError unless text can be sampled so, before a model is opened."""
    if tokens < 1 or not temperature >= 0 or (top_k is not None and top_k < 1):  # NaN is not at least 0
        raise UsageError("tokens and top_k must be at least 1, and the temperature at least 0")
    if not prompt.isprintable() and any("\ud800" <= char <= "\udfff" for char in prompt):  # bytes that are not UTF-8
        raise UsageError("the prompt is not UTF-8 text; convert it, or type it in a UTF-8 terminal")


def continue_text(
    opened: OpenedModel,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Continue `prompt` with an opened model; see `generate`."""
    config, tokenizer, model = opened.config, opened.tokenizer, opened.build()
    start = tokenizer.encode(prompt or "\n").tolist()  # the model needs at least one token to continue
    if not start:
        raise UsageError("the run's tokenizer turns this prompt into no tokens; use another prompt")
    if max(start) >= config.vocabulary:
        raise UsageError(
            f"the prompt has tokens that this model of {config.vocabulary} does not know; use another prompt"
        )
    sampled = sample_tokens(model, start, temperature, top_k, seed, usable_tokens(opened))
    pieces = tokenizer.decode(itertools.islice(sampled, tokens), after=start)
    return (sanitize(piece, "\n\t") for piece in pieces)


def usable_tokens(opened: OpenedModel) -> Tensor:
    """Return the ids, int64, that are tokens and that the model knows."""
    ids = opened.tokenizer.ids
    return torch.from_numpy(ids[ids < opened.config.vocabulary])


def sample_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    temperature: float,
    top_k: int | None,
    seed: int,
    usable: Tensor,
) -> Iterator[int]:
    """Yield tokens that continue `prompt` (at least one token), without end; equal seeds give equal tokens.

    Args:
        usable: ids that are tokens, int64; no other id is sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    window = deque(prompt, maxlen=model.config.context)
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([list(window)], device=model.flat.device))[0, -1].cpu()[usable]
        if not torch.isfinite(logits).all():
            raise CheckpointError("the model's output is not finite: its training diverged; use another checkpoint")
        token = int(usable[sample_token(logits, temperature, top_k, generator)])
        window.append(token)
        yield token


def sample_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Sample an index of `logits` (vocabulary,). Raises CheckpointError if one is not finite."""
    if not logits.isfinite().all():
        raise CheckpointError("the model's output is not finite, so its training has diverged; use an older checkpoint")
    if temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    kept = logits.topk(min(top_k or len(logits), len(logits)))
    probabilities = torch.softmax(kept.values / temperature, dim=-1)
    return int(kept.indices[torch.multinomial(probabilities, 1, generator=generator)])
