"""The modules of a decoder without attention: matrices, embedding, RMSNorm (arXiv 1910.07467), SwiGLU (2002.05202)."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.computation.fp8 import multiply
from node.model.joined_weights import join_rows
from protocol.manifest.model import ModelSection


class _Uninitialised:
    """Leave the weights alone: `node.model.initialization` computes them, and torch need not."""

    def reset_parameters(self) -> None:
        pass


class HasProducts(nn.Module):
    """A module with products of matrices, all in fp8 if `in_fp8`."""

    in_fp8 = False


class Linear(_Uninitialised, HasProducts, nn.Linear):
    """A matrix without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return the product of values (..., inputs) with the matrix: (..., outputs)."""
        return multiply(values, self.weight, self.in_fp8)


class Embedding(_Uninitialised, nn.Embedding):
    """One row for each token id."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of token ids in fp32, whatever the type of the weights is."""
        return super().forward(tokens).float()


class RMSNorm(_Uninitialised, nn.RMSNorm):
    """Compute x / sqrt(mean(x^2) + epsilon) * weight over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__(width, epsilon)

    def forward(self, values: Tensor) -> Tensor:
        """Return the normalized values (..., width) in their own type, whatever that of the gains is."""
        return F.rms_norm(values, self.normalized_shape, self.weight.type_as(values), self.eps)


class GatedMlp(HasProducts):
    """SwiGLU of one layer, or of one expert."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.hidden)
        self.up_proj = Linear(config.width, config.hidden)
        self.down_proj = Linear(config.hidden, config.stream_width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return what the MLP adds to the stream (..., W), or to its values in a subspace (..., K)."""
        joined = join_rows(self.gate_proj.weight, self.up_proj.weight)
        gate, up = multiply(stream, joined, self.in_fp8).chunk(2, dim=-1)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output
