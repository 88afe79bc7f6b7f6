"""The decoder as a torch module, whole or one stage of it: its family supplies attention and MLP.

Letters in comments: B sequences, T tokens, W width.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.computation.fp8 import require_fp8_sizes
from node.model.computation.precision import has_bf16
from node.model.cut import WHOLE, Cut
from node.model.decoders.attention import (
    Attention,
    CausalAttention,
    CompiledCausalAttention,
    DenseCausalAttention,
)
from node.model.decoders.experts import SparseMlp
from node.model.decoders.layers import Embedding, HasProducts, Linear, RMSNorm
from node.model.decoders.subspace import Subspace
from node.model.interface import Block, LanguageModel
from node.model.shapes import ShapeTable
from protocol.manifest.model import ModelSection


class Parts(Protocol):
    """The parts of a decoder that depend on its family."""

    def shape_table(self, config: ModelSection, cut: Cut) -> ShapeTable:
        """Return names, shapes and order of a cut's parameters."""

    def block_range(self, config: ModelSection, cut: Cut) -> range:
        """Return the numbers of a cut's blocks."""

    def attention(self, config: ModelSection, causal: CausalAttention) -> Attention:
        """Build the attention of a layer."""

    def mlp(self, config: ModelSection) -> nn.Module:
        """Build the MLP of a layer, which maps the stream (B, T, W) to its own addition to it."""


class DecoderLayer(nn.Module):
    """One decoder layer: attention and MLP, each after a norm and added to the stream."""

    def __init__(self, parts: Parts, config: ModelSection, causal: CausalAttention, subspace: Subspace | None) -> None:
        super().__init__()
        self.to_stream = nn.Identity() if subspace is None else subspace
        self.self_attn = parts.attention(config, causal)
        self.mlp = parts.mlp(config)
        self.input_layernorm = RMSNorm(config.width, config.norm_epsilon)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_epsilon)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the new stream; both (B, T, W)."""
        stream = stream + self.to_stream(self.self_attn(self.input_layernorm(stream)))
        stream = stream + self.to_stream(self.mlp(self.post_attention_layernorm(stream)))
        return stream


class DecoderBody(nn.Module):
    """All parts of a cut but the output matrix, with Hugging Face's names."""

    def __init__(self, config: ModelSection, cut: Cut, layers: dict[int, DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocabulary, config.stream_width) if cut.has_embedding else None
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        self.norm = RMSNorm(config.width, config.norm_epsilon) if cut.has_head else None


class Decoder(LanguageModel):
    """The decoder, whole or one stage of it."""

    attention_type: type[CausalAttention] = CausalAttention

    def __init__(
        self, parts: Parts, config: ModelSection, device: torch.device | str = "cpu", cut: Cut = WHOLE
    ) -> None:
        super().__init__(config, parts.shape_table(config, cut), cut)
        blocks, self._causal = parts.block_range(config, cut), self.attention_type(config, device)
        self.subspace = None if config.subspace is None else Subspace(config, device)
        numbers = range(max(0, blocks.start - 1), min(config.layers, blocks.stop - 1))
        with torch.device("meta"):
            layers = {number: DecoderLayer(parts, config, self._causal, self.subspace) for number in numbers}
            self.model = DecoderBody(config, cut, layers)
            has_output = cut.has_head and not config.tied
            self.lm_head = Linear(config.width, config.vocabulary) if has_output else None
        self._place_parameters(device)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return embedding, layers and head, or those of them that the stage has."""
        embed = self.model.embed_tokens if self.subspace is None else self._embed
        embedding = (embed,) if self.cut.has_embedding and embed is not None else ()
        head = (self._apply_head,) if self.cut.has_head else ()
        return (*embedding, *self.model.layers.values(), *head)

    def multiply_in_fp8(self) -> None:
        """Multiply the matrices of all layers in fp8; embedding, router and output stay as they are."""
        require_fp8_sizes(self.config)
        for module in self.model.layers.modules():
            if isinstance(module, HasProducts):
                module.in_fp8 = True

    def see(self, tokens: Tensor) -> None:
        """Take note of the documents in the token ids (B, T) of a pass."""
        self._causal.see(tokens)

    def read_stream(self, values: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the stream from the values that a stage receives."""
        if self.subspace is None:
            return values
        if tokens is None:
            raise ValueError("a stage of a model with a subspace needs the token ids")
        return self.subspace.expand(values, tokens)

    def write_stream(self, stream: Tensor, tokens: Tensor | None) -> Tensor:
        """Return what a stage sends: of a model with a subspace, the values in it."""
        return stream if self.subspace is None or tokens is None else self.subspace.compress(stream, tokens)

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self.model.embed_tokens is not None
        return self.read_stream(self.model.embed_tokens(tokens), tokens)

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return the mean balance loss of all layers of the model, as far as they are of this stage."""
        if self.config.experts is None:  # the compiler need not look at the layers
            return None
        mlps = [layer.mlp for layer in self.model.layers.values()]
        losses = [loss for mlp in mlps if isinstance(mlp, SparseMlp) and (loss := mlp.take_balance_loss()) is not None]
        return torch.stack(losses).sum() * (self.config.balance_loss / self.config.layers) if losses else None

    def take_routed_tokens(self) -> tuple[int, ...]:
        """Return for each expert, layer by layer, the tokens that it was trained on since the last call."""
        mlps = (layer.mlp for layer in self.model.layers.values())
        return tuple(count for mlp in mlps if isinstance(mlp, SparseMlp) for count in mlp.take_routed_tokens())

    def output_factors(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized stream and the output matrix, which may be that of the embedding."""
        output = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert self.model.norm is not None and output is not None
        return self.model.norm(stream), output.weight

    def _apply_head(self, stream: Tensor) -> Tensor:
        return F.linear(*self.output_factors(stream))


class CompiledDecoder(Decoder):
    """The same model, compiled, its matrix products in bf16 where the device has that, its weights in fp32.

    `place`: where its weights are before they are dealt to several devices; else on `device`, which computes.
    """

    def __init__(
        self,
        parts: Parts,
        config: ModelSection,
        device: torch.device | str = "cpu",
        place: torch.device | str | None = None,
    ) -> None:
        self._device_type, self._has_bf16 = torch.device(device).type, has_bf16(torch.device(device))
        self.attention_type = CompiledCausalAttention if self._device_type == "cpu" else DenseCausalAttention
        super().__init__(parts, config, device if place is None else place)
        for module in self.modules():
            if isinstance(module, SparseMlp):
                module.exclude_from_compiler()
        self._compile()

    def _compile(self) -> None:
        self.compile(dynamic=False)

    def forward(self, inputs: Tensor, targets: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Return logits or loss, as `LanguageModel.forward`."""
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._has_bf16):
            return super().forward(inputs, targets, tokens)


class LayerwiseDecoder(CompiledDecoder):
    """The same, compiled layer by layer: one program for all layers, whose weights may be gathered before each pass."""

    def _compile(self) -> None:
        for layer in self.model.layers.values():
            assert isinstance(layer, DecoderLayer)
            layer.forward = torch.compile(layer.forward, dynamic=False)  # type: ignore[method-assign]
