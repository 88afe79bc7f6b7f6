"""The inner optimizer of one rank: the method's update rule on its part of each parameter."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from node.trainer.inner_step import SLAB_SIZES, InnerOptimizer
from node.trainer.ranks.group import RankGroup
from node.trainer.ranks.sharded_model import ShardedModel
from node.trainer.ranks.shards import Shard
from optim.experts.routed_tokens import add_tokens
from optim.inner.base import InnerStep, InnerUpdateRule
from optim.kernels.vectors import slabs
from protocol.manifest.sections import TrainSection


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
