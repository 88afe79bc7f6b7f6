"""Keep attention within documents, of which several are packed into a window.

The token that ends a document opens the next one: it sees nothing of the document before it, and the tokens after it
see it. So every target is predicted from its own document, the first token of one from the opening token alone, as when
a text is generated, and the loss counts all targets. Positions do not restart: rotary attention depends on differences
of positions only.

Letters in comments: B sequences, T tokens, N heads, K heads of keys and values, D width of a head.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

logger = logging.getLogger(__name__)
Flex = Callable[..., Tensor]


class DocumentAttention(Protocol):
    """Causal attention within the documents of the tokens that it saw last."""

    def see(self, tokens: Tensor) -> None:
        """Take note of the token ids (B, T) of a pass, before its first layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply attention to `query` (B, N, T, D), `key` and `value` (B, K, T, D); return (B, N, T, D)."""


def number_documents(tokens: Tensor, end: int) -> Tensor:
    """Return the number of the document of each token (B, T); documents end with the token `end`."""
    return torch.cumsum(tokens == end, dim=1)


class DenseDocuments:
    """Attention with a mask (B, 1, T, T) of all pairs, for every device; the future may be hidden elsewhere."""

    def __init__(self, end: int, hides_future: bool = True) -> None:
        self._end = end
        self._hides_future = hides_future
        self.mask = torch.empty(0)

    def see(self, tokens: Tensor) -> None:
        numbers = number_documents(tokens, self._end)
        is_same = (numbers[:, :, None] == numbers[:, None, :])[:, None]
        self.mask = is_same.tril() if self._hides_future else is_same

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.shape[1] != query.shape[1]:  # the kernels with a mask know no groups
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)


class BlockDocuments:
    """Attention that skips blocks of pairs of different documents (flex attention)."""

    def __init__(self, end: int, flex: Flex) -> None:
        self._end = end
        self._flex = flex
        self._blocks: Any = None

    def see(self, tokens: Tensor) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        numbers, (batch, length) = number_documents(tokens, self._end), tokens.shape

        def is_seen(sequence: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (numbers[sequence, query] == numbers[sequence, key])

        self._blocks = create_block_mask(is_seen, batch, None, length, length, device=tokens.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = key.shape[1] != query.shape[1]
        return self._flex(query, key, value, block_mask=self._blocks, enable_gqa=grouped)


def choose_document_attention(end: int, device: torch.device | str, head_width: int) -> DocumentAttention:
    """Return the faster attention that works on the device."""
    device = torch.device(device)
    flex = compiled_flex(device, head_width) if device.type == "cuda" else None
    return DenseDocuments(end) if flex is None else BlockDocuments(end, flex)


@cache
def compiled_flex(device: torch.device, head_width: int) -> Flex | None:
    """Return flex attention, compiled; `None` if a small pass of it fails here, after one line."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Flex = torch.compile(flex_attention, dynamic=False)
    trial = BlockDocuments(0, compiled)
    try:
        trial.see(torch.zeros(1, 128, dtype=torch.int64, device=device))
        heads = torch.randn(1, 1, 128, head_width, device=device, requires_grad=True)
        torch.autograd.backward(trial.attend(heads, heads, heads).sum())
    except Exception as error:  # a compiler that is missing or fails raises errors of many kinds
        reason = " ".join(str(error).split())[:200]
        logger.warning("attention within documents uses a full mask: %s: %s", type(error).__name__, reason)
        return None
    return compiled
