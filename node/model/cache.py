"""Keys and values of the tokens that a decoder has read: the next token costs one position instead of the whole window.

    bytes = 2 * layers * heads of keys * width of a head * bytes of a value * rows * slots

Texts of one batch have unequal lengths. Padding on the left, which no token sees, aligns their ends, so that all rows
write to the same slot. Positions count from the first token of each text, so a row does not depend on the others.

Letters in comments: B rows, T tokens of a pass, U used slots, N heads, K heads of keys and values, D width of a head.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class KeyValueCache:
    """The cache of all layers of one batch; each pass appends its tokens to every row.

    Args:
        padding: unused slots before each text, (B,) int64.
        length: slots of a row, for its padding and its tokens.
        document_end: the token that ends a document, across which no token sees another.
    """

    def __init__(self, padding: Tensor, length: int, document_end: int | None = None) -> None:
        self.length = length
        self.used = 0
        self.positions = padding[:, None]  # of the tokens of the present pass, (B, T)
        self._padding = padding
        self._first_seen = padding  # the first slot that the newest token of each row sees
        self._document_end = document_end
        self._sees_all = document_end is None and not bool(padding.any())
        self._layer = 0
        self._mask: Tensor | None = None
        self._keys: list[Tensor] = []  # of each layer, (B, K, length, D)
        self._values: list[Tensor] = []

    def see(self, tokens: Tensor) -> None:
        """Make room for the token ids (B, T) of a pass, before its first layer."""
        count = tokens.shape[1]
        if self.used + count > self.length:
            raise ValueError(f"{self.used + count} tokens do not fit a cache of {self.length}")
        slots = torch.arange(self.used, self.used + count, device=tokens.device)
        self.used += count
        self._layer = 0
        self.positions = (slots - self._padding[:, None]).clamp(min=0)
        needs_mask = not self._sees_all or 1 < count < self.used
        self._mask = self._make_mask(tokens, slots) if needs_mask else None

    def _make_mask(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Build the mask (B, 1, T, U) of the pairs that attend; padding attends to itself, because softmax must."""
        first = self._first_seen[:, None]
        if self._document_end is not None:
            ends = torch.where(tokens == self._document_end, slots, -1)
            first = torch.maximum(first, ends.cummax(dim=1).values)
            self._first_seen = first[:, -1]
        keys = torch.arange(self.used, device=tokens.device)
        seen = (keys >= first[..., None]) & (keys <= slots[:, None])
        return (seen | (keys == slots[:, None]))[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store `key` and `value` (B, K, T, D) of the next layer, and apply attention to `query` (B, N, T, D)."""
        keys, values = self._append(key, value)
        rows, heads, count, width = query.shape
        if count == 1:  # the queries of a group take the place of tokens, so nothing is repeated
            grouped = query.reshape(rows, key.shape[1], -1, width)
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
            return mixed.reshape(rows, heads, 1, width)
        if heads != key.shape[1]:
            keys, values = (each.repeat_interleave(heads // key.shape[1], dim=1) for each in (keys, values))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=self._mask, is_causal=self._mask is None)

    def _append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store what a layer has computed of the pass; returns all its keys and values (B, K, U, D)."""
        layer, start = self._layer, self.used - key.shape[2]
        self._layer += 1
        if layer == len(self._keys):
            shape = (*key.shape[:2], self.length, key.shape[3])
            self._keys.append(key.new_empty(shape))
            self._values.append(value.new_empty(shape))
        stored = self._keys[layer], self._values[layer]
        for memory, new in zip(stored, (key, value), strict=True):
            memory[:, :, start : self.used] = new
        return stored[0][:, :, : self.used], stored[1][:, :, : self.used]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these, (R,) int64."""
        self._padding, self._first_seen = self._padding[rows], self._first_seen[rows]
        self._keys = [memory[rows] for memory in self._keys]
        self._values = [memory[rows] for memory in self._values]
