"""Choose which results a layer keeps for its backward pass; the others are computed again there.

    none        all activations
    selective   its input and the results of its matrix products; attention, norms, gates and positions run again
    full        its input; the layer runs again

The gradient has the same bits in all three. Attention keeps more than anything else in long contexts, and it is cheap
beside the matrix products (docs/results/devices.md).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

Recompute = Literal["none", "selective", "full"]

_PRODUCTS: Final = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}


def run_layer(layer: Callable[[Tensor], Tensor], stream: Tensor, recompute: Recompute) -> Tensor:
    """Return the new stream; without gradients nothing is kept in any case."""
    if recompute == "none" or not torch.is_grad_enabled():
        return layer(stream)
    contexts = noop_context_fn if recompute == "full" else partial(create_selective_checkpoint_contexts, _policy)
    new: Tensor = checkpoint(layer, stream, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return new


def _policy(_context: object, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
