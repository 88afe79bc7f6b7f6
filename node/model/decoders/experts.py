"""A mixture of experts in the place of an MLP: a router sends each token to a few of many small MLPs.

The balance loss is that of Switch (arXiv 2101.03961, equation 4) for several experts per token: E sum_e f_e P_e, with
f_e the share of tokens that expert e gets and P_e its mean probability. It is computed for each layer alone, so that a
stage of a pipeline can do so.

Letters in comments: S tokens of all sequences, W width, E experts, K experts per token.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.decoders.layers import GatedMlp, Linear
from optim.experts.routed_tokens import add_tokens
from protocol.manifest.model import ModelSection


class SparseMlp(nn.Module):
    """Router and experts of one layer. `take_balance_loss` returns the loss of the last forward pass with gradients."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        assert config.experts is not None and config.experts_per_token is not None
        self.per_token, self.normalizes = config.experts_per_token, config.normalize_experts
        self.gate = Linear(config.width, config.experts)
        self.experts = nn.ModuleList(GatedMlp(config) for _ in range(config.experts))
        self._balance_loss: Tensor | None = None
        # tokens of the backward passes since `take_routed_tokens`
        self._routed: tuple[int, ...] = (0,) * config.experts

    def exclude_from_compiler(self) -> None:
        """Let a compiled model call this module as it is: how many tokens an expert gets differs in each pass.

        The decorator of the same name would import torch's compiler, which costs each process of each peer a second.
        """
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign, no-untyped-call]

    def forward(self, stream: Tensor) -> Tensor:
        """Return what the experts add to the stream (B, T, W), or to its values in a subspace."""
        tokens = stream.flatten(0, 1)
        weights, chosen = self._route(tokens)
        order = chosen.flatten().argsort(stable=True)  # (S K,), grouped by expert
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        sources = order // self.per_token
        groups = torch.split(tokens[sources], counts)
        made = [expert(group) for expert, group in zip(self.experts, groups, strict=True) if len(group)]
        weighted = torch.cat(made).float() * weights.flatten()[order, None]
        mixed = weighted.new_zeros(len(tokens), weighted.shape[-1]).index_add(0, sources, weighted)
        if mixed.requires_grad:
            # Counting in the backward pass: a layer that is computed again there has its tokens counted once.
            mixed.register_hook(lambda _: self._count(counts))  # type: ignore[no-untyped-call]
        return mixed.type_as(stream).view(*stream.shape[:2], -1)

    def take_routed_tokens(self) -> tuple[int, ...]:
        """Return for each expert the tokens that it was trained on since the last call."""
        routed, self._routed = self._routed, (0,) * len(self.experts)
        return routed

    def _count(self, counts: list[int]) -> None:
        self._routed = add_tokens(self._routed, counts)

    def take_balance_loss(self) -> Tensor | None:
        """Return the balance loss of the last forward pass, once; None if it ran without gradients."""
        loss, self._balance_loss = self._balance_loss, None
        return loss

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers (S, K) of the experts of each token; the router runs in fp32."""
        with torch.autocast(tokens.device.type, enabled=False):
            probabilities = F.softmax(F.linear(tokens.float(), self.gate.weight.float()), dim=-1)  # (S, E)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        if torch.is_grad_enabled():
            self._balance_loss = balance_loss(probabilities, chosen)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen


def balance_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return K for tokens that spread evenly over the experts, and up to E for the opposite.

    Args:
        probabilities: (S, E).
        chosen: numbers of the experts (S, K).
    """
    experts = probabilities.shape[-1]
    shares = torch.bincount(chosen.flatten(), minlength=experts) / len(chosen)
    return experts * (shares * probabilities.mean(dim=0)).sum()
