"""A model of which each rank holds a part of every parameter (FSDP2, `fully_shard`).

A layer's parameters are gathered before its forward and its backward pass and dropped afterwards, and its gradient is
summed over the ranks and dealt to them. On an accelerator the layers are gathered in bf16, which is the type of their
products; all that a rank keeps is fp32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from node.model import LanguageModel
from node.trainer.ranks.far_parts import receive_part, send_part
from node.trainer.ranks.group import RankGroup
from node.trainer.ranks.shards import Shard, own_shards


class ShardedModel:
    """The parts of one rank. `module` computes with the whole model, whenever all ranks call it."""

    def __init__(self, model: LanguageModel, group: RankGroup, gathers_bf16: bool) -> None:
        self.module = model
        self.shards = own_shards(model.shapes.layout, group.shard_ranks, group.shard_rank)
        self.numel = self.shards[-1].own[1]
        _shard(model, group, gathers_bf16)
        named = dict(model.named_parameters())
        self._parameters = [named[name] for name in model.shapes.names]
        for shard, parameter in zip(self.shards, self._parameters, strict=True):
            if _local(parameter).shape != shard.shape:
                raise ValueError(f"FSDP gives this rank {tuple(_local(parameter).shape)} instead of {shard.shape}")

    @property
    def parts(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield each part that is not empty, and its weights (n,) on the device."""
        for shard, parameter in zip(self.shards, self._parameters, strict=True):
            if not shard.is_empty:
                yield shard, _local(parameter).view(-1)

    @property
    def gradients(self) -> Iterator[tuple[Shard, Tensor, Tensor]]:
        """Yield each part, its weights (n,) and its gradient (n,), after a backward pass."""
        for shard, parameter in zip(self.shards, self._parameters, strict=True):
            weights = _local(parameter).view(-1)
            if parameter.grad is None and not shard.is_empty:
                raise ValueError("the model has no gradient; run backward first")
            yield shard, weights, weights if parameter.grad is None else _local(parameter.grad).view(-1)

    def clear_gradient(self) -> None:
        """Drop all gradients and free their memory."""
        for parameter in self._parameters:
            parameter.grad = None

    def load(self, flat: Tensor) -> None:
        """Copy this rank's weights from the flat vector of the whole model."""
        for shard, weights in self.parts:
            weights.copy_(flat[slice(*shard.whole)])

    def save(self, flat: Tensor) -> None:
        """Copy this rank's weights to their places in the flat vector of the whole model."""
        for shard, weights in self.parts:
            flat[slice(*shard.whole)].copy_(weights)

    def load_far(self, rank: int) -> None:
        """Receive this rank's weights from a rank on another machine."""
        for _, weights in self.parts:
            receive_part(weights, rank)

    def save_far(self, rank: int) -> None:
        """Send this rank's weights to a rank on another machine."""
        for _, weights in self.parts:
            send_part(weights, rank)

    def copy_parts(self) -> list[Tensor]:
        """Return copies of the weights of this rank's parts."""
        return [weights.clone() for _, weights in self.parts]

    def replace_parts(self, values: list[Tensor]) -> None:
        """Replace the weights of this rank's parts, in the same order."""
        for (_, weights), value in zip(self.parts, values, strict=True):
            weights.copy_(value)

    @contextmanager
    def loaded(self, flat: Tensor | None) -> Iterator[None]:
        """Give the model other weights inside the context, and its own again afterwards; no backward pass there.

        Without a flat vector, rank 0 sends this rank's part of it.
        """
        own = self.copy_parts()
        if flat is None:
            self.load_far(0)
        else:
            self.load(flat)
        try:
            yield
        finally:
            self.drop_gathered()
            self.replace_parts(own)

    def copy_gradient(self, *, is_last: bool) -> None:
        """Let the next backward pass add the gradients of all copies; a pass before the last one keeps its own."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_all_reduce(is_last)

    def drop_gathered(self) -> None:
        """Drop parameters that a forward pass without a backward one has left gathered."""
        assert isinstance(self.module, FSDPModule)
        self.module.reshard()


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return local


def _shard(model: LanguageModel, group: RankGroup, gathers_bf16: bool) -> None:
    """Cut all parameters, layer by layer, so that no more than one layer is whole on the device."""
    model.give_up_flat()
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.blocks[1:-1]:
        assert isinstance(block, nn.Module)
        fully_shard(block, mesh=group.mesh, mp_policy=mixed if gathers_bf16 else MixedPrecisionPolicy())
    fully_shard(model, mesh=group.mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss of a pass has its weight in the batch
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(True)  # an expert without tokens on one rank may have some on another
