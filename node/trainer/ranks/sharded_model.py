"""A model and its inner optimizer, of which each rank holds a part of every parameter (FSDP2, `fully_shard`).

A layer's parameters are gathered before its forward and its backward pass and dropped afterwards, and its gradient is
summed over the ranks and dealt to them. On an accelerator the layers are gathered in bf16, which is the type of their
products; all that a rank keeps is fp32.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from node.model import LanguageModel
from node.trainer.inner_step import SLAB_SIZES, InnerOptimizer
from node.trainer.ranks.group import RankGroup, receive_part, send_part
from node.trainer.ranks.shards import Shard, own_shards
from optim.experts import add_tokens
from optim.inner.base import InnerStep, InnerUpdateRule
from optim.kernels.vectors import slabs
from protocol.manifest.sections import TrainSection


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


class ShardedOptimizer(InnerOptimizer):
    """Applies an update rule to the parts of one rank. `vectors` are flat, of these parts."""

    def __init__(self, model: ShardedModel, train: TrainSection, inner: InnerUpdateRule, group: RankGroup) -> None:
        super().__init__(model.module, train, inner)
        self._sharded = model
        self._group = group
        self._routed: tuple[int, ...] = ()

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """Return the state vectors by name; at the first call they are made of zeros."""
        if self._vectors is None:
            zeros = {name: torch.zeros(self._sharded.numel, device=self._group.device) for name in self._inner.vectors}
            self._vectors = zeros
        return self._vectors

    def count_routed(self, tokens: Sequence[int]) -> None:
        """Count the tokens on which all ranks together trained each expert."""
        self._routed = add_tokens(self._routed, tokens)

    def take_routed_tokens(self) -> tuple[int, ...]:
        """Return for each expert of the model the tokens that it was trained on since the last call."""
        routed, self._routed = self._routed, ()
        return routed

    def lookahead_weights(self, step: int) -> Tensor | None:
        """Refuse: such weights are those of a whole model."""
        raise NotImplementedError("ask each rank for its own")

    def own_lookahead_weights(self, step: int) -> list[Tensor] | None:
        """Return this rank's weights at which to take the gradient of a step, part by part; `None`: those it has."""
        inputs, ahead = self._step_inputs(step), []
        for shard, weights in self._sharded.parts:
            vectors = {name: vector[slice(*shard.own)] for name, vector in self.vectors.items()}
            part = self._inner.lookahead_weights(weights, vectors, inputs.within(*shard.whole))
            if part is None:
                return None
            ahead.append(part)
        return ahead

    def gradient_norm(self) -> float:
        """Return the norm of the whole model's gradient, the same on all ranks; it may not be finite."""
        norms = [torch.linalg.vector_norm(gradient) for *_, gradient in self._sharded.gradients]
        own = float(torch.stack(norms).double().square().sum())
        return math.sqrt(self._group.sum(own)[0] / self._group.copies)

    def apply(self, step: int, norm: float) -> None:
        """Apply the gradient of this rank's parts; `norm` is that of the whole gradient."""
        inputs = self._step_inputs(step)
        for shard, weights, gradient in self._sharded.gradients:
            if norm > self.train.clip:
                gradient.mul_(self.train.clip / norm)
            tensor = inputs.of_tensor(*shard.tensor)
            if self._inner.needs_whole(tensor):
                self._apply_whole(shard, weights, gradient, tensor)
            else:
                self._apply_slabs(shard, weights, gradient, inputs)

    def _apply_slabs(self, shard: Shard, weights: Tensor, gradient: Tensor, inputs: InnerStep) -> None:
        """Apply an elementwise step to a part, slab by slab."""
        first, place = shard.whole[0], shard.own[0]
        for slab in slabs(weights.numel(), SLAB_SIZES[weights.device.type]):
            own = slice(place + slab.start, place + slab.stop)
            vectors = {name: vector[own] for name, vector in self.vectors.items()}
            self._inner.step(
                weights[slab], gradient[slab], vectors, inputs.within(first + slab.start, first + slab.stop)
            )

    def _apply_whole(self, shard: Shard, weights: Tensor, gradient: Tensor, tensor: InnerStep) -> None:
        """Gather a parameter and everything about it from all ranks, apply the step, and keep this rank's part."""
        size, start = shard.tensor[1] - shard.tensor[0], shard.whole[0] - shard.tensor[0]
        parts = {name: vector[slice(*shard.own)] for name, vector in self.vectors.items()}
        vectors = {name: self._group.gather(part, shard.largest)[:size] for name, part in parts.items()}
        whole = self._group.gather(weights, shard.largest)[:size]
        self._inner.step(whole, self._group.gather(gradient, shard.largest)[:size], vectors, tensor)
        for part, found in ((weights, whole), *((parts[name], vectors[name]) for name in parts)):
            part.copy_(found[start : start + len(part)])

    def clear_gradient(self) -> None:
        """Drop the gradient."""
        self._sharded.clear_gradient()
