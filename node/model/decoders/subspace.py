"""The residual stream of a model with `model.subspace`: a fixed row for each token plus a point of a subspace.

    x = F[token] + V z,   V (W, K) with orthogonal columns of length sqrt(W / K),   z (K,)

The embedding gives the first z, and each layer adds to it: matrices that write into the stream are stored as factors A
of V A. So no optimizer and no merge leaves the subspace, and z is all that stages need of each other, with the token
ids. Columns of this length give A the scale that V A has in a model without a subspace, so initial weights and learning
rates stay the same.

V and F follow from their shapes alone, so weights of one run fit another. V has random columns of the DCT-II, each row
with a random sign. Nobody stores F: a row is the product of two rows of small tables, and unlike tokens have nearly
orthogonal rows.

    F[token] = codes[token mod n] * signs[token div n],   n = sqrt(vocabulary), rounded up

Letters in comments: B sequences, T tokens, W width, K values of a token in the subspace.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.random_values import fill_bell_curve, random_order, random_signs, stream_of
from protocol.manifest.model import ModelSection

ROW_DEVIATION = 0.2  # of the values of F; 0.02 and 1 gave a higher loss (docs/results/pipelines.md)


class Subspace(nn.Module):
    """The map between a stream (B, T, W) and its values (B, T, K)."""

    basis: Tensor  # V (W, K)
    codes: Tensor  # (n, W)
    signs: Tensor  # (n, W)

    def __init__(self, config: ModelSection, device: torch.device | str) -> None:
        super().__init__()
        self._side = math.isqrt(config.vocabulary - 1) + 1
        tables = {
            "basis": make_basis(config.width, config.stream_width),
            "codes": torch.empty(self._side, config.width),
            "signs": random_signs(stream_of("murmur subspace signs"), self._side * config.width),
        }
        fill_bell_curve(tables["codes"].view(-1), ROW_DEVIATION, stream_of("murmur subspace codes"))
        tables["signs"] = tables["signs"].view(self._side, config.width)
        for name, table in tables.items():
            self.register_buffer(name, table.to(device), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return V z (..., W) for values z (..., K)."""
        return F.linear(values, self.basis)

    def fixed_rows(self, tokens: Tensor) -> Tensor:
        """Return the rows of F (..., W) of token ids (...)."""
        high = torch.div(tokens, self._side, rounding_mode="floor")
        return F.embedding(tokens % self._side, self.codes) * F.embedding(high, self.signs)

    def expand(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Return the stream (B, T, W) in fp32 for values (B, T, K) and token ids (B, T)."""
        with torch.autocast(values.device.type, enabled=False):
            stream: Tensor = self.fixed_rows(tokens) + self(values.float())
        return stream

    def compress(self, stream: Tensor, tokens: Tensor) -> Tensor:
        """Return the values (B, T, K) in fp32 of a stream (B, T, W)."""
        width, count = self.basis.shape
        with torch.autocast(stream.device.type, enabled=False):
            return (stream.float() - self.fixed_rows(tokens)) @ self.basis * (count / width)


def make_basis(width: int, count: int) -> Tensor:
    """Return V (width, count) in fp32."""
    frequencies = 1 + random_order(stream_of("murmur subspace frequencies"), width - 1)[:count]
    angles = torch.outer(torch.arange(width, dtype=torch.float64) + 0.5, frequencies.double() * (math.pi / width))
    signs = random_signs(stream_of("murmur subspace basis"), width)
    return (math.sqrt(2 / count) * angles.cos()).float() * signs[:, None]
