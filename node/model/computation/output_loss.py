"""The cross entropy of an output matrix, without the logits of all tokens at once.

The logits of a batch are larger than anything else in a small model with a large vocabulary: 8,192 tokens of 128
thousand words take 4 GB, and their gradient as much again. Here a chunk of tokens has its logits, its loss and the
gradients of both factors computed before the next one begins, all in the forward pass, so nothing is computed twice.
A batch that is no more than a chunk takes the ordinary way, which is faster for it.

    loss = mean over the counted tokens of  log sum exp(h W^T) - (h W^T)[target]

Letters in comments: S tokens of all sequences, W width, V vocabulary.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

IGNORED: Final = -100  # a target that does not count, as in torch
CHUNK_VALUES: Final = {"cpu": 1 << 22, "cuda": 1 << 27}  # logits of a chunk
MIN_CHUNK_TOKENS: Final = 512  # a chunk of fewer reads the output matrix too often
MAX_COMPILED_CHUNKS: Final = 8  # each is a part of the compiled program


def output_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per counted token; gradients flow to `hidden` and `weight`.

    Under autocast the matrix products run in its type and the rest in fp32. Only one backward pass is possible.

    Args:
        hidden: (S, W).
        weight: (V, W).
        targets: (S,) int64; a token with `IGNORED` does not count.
    """
    device, (tokens, vocabulary) = hidden.device.type, (len(hidden), len(weight))
    size = chunk_tokens(tokens, vocabulary, device)
    if size >= tokens:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORED)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, dtype, size, torch.is_grad_enabled()
        )
    return loss


def chunk_tokens(tokens: int, vocabulary: int, device: str) -> int:
    """Return how many of the tokens of a batch have their logits at the same time."""
    size = max(MIN_CHUNK_TOKENS, CHUNK_VALUES[device] // vocabulary)
    return max(size, -(-tokens // MAX_COMPILED_CHUNKS)) if torch.compiler.is_compiling() else size


class _ChunkedLoss(torch.autograd.Function):
    """Compute the loss and, where it is wanted, its gradients, which the backward pass only scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, size: int, differentiates: bool
    ) -> Tensor:
        matrix, counted = weight.to(dtype), (targets != IGNORED).to(hidden.dtype)[:, None]
        labels = targets.clamp(min=0)[:, None]
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden = torch.empty_like(hidden) if differentiates else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if differentiates else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            rows = hidden[part].to(dtype)
            values = F.log_softmax(F.linear(rows, matrix).float(), dim=-1)
            total -= (values.gather(1, labels[part]) * counted[part]).sum()
            if of_hidden is None or of_weight is None:
                continue
            slopes = _slopes(values, labels[part]).to(dtype)
            of_hidden[part] = (slopes @ matrix) * counted[part]
            _add_product(of_weight, slopes, rows * counted[part].to(dtype))
        count = counted.sum()
        ctx.save_for_backward(of_hidden, of_weight, count)
        ctx.weight_type = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, count = ctx.saved_tensors
        scale = gradients[0] / count
        return of_hidden.mul_(scale), of_weight.mul_(scale).to(ctx.weight_type), None, None, None, None


def _slopes(values: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each token's loss by its logits, exp(values) - [v = label]; `values` may be its memory."""
    if torch.compiler.is_compiling():  # the compiler makes one loop of this
        return values.exp() - (torch.arange(values.shape[1], device=values.device) == labels).to(values.dtype)
    return values.exp_().scatter_add_(1, labels, values.new_full((), -1.0).expand_as(labels))


def _add_product(total: Tensor, slopes: Tensor, rows: Tensor) -> None:
    """Add slopes^T rows to `total`, which may have a finer type."""
    if rows.dtype == total.dtype:
        total.addmm_(slopes.T, rows)
    else:
        total += slopes.T @ rows
