"""A decoder as a torch module, from its matrices to the whole; its family chooses the layer, attention and MLP.

    layers      matrix, embedding, RMSNorm (arXiv 1910.07467), SwiGLU (2002.05202)
    experts     in the place of an MLP, a router sends each token to a few of many small MLPs
    positions   rotary (2104.09864), with the scalings that models with long contexts have
    documents   attention within each of the documents that are packed into a window
    attention   grouped-query (2305.13245), in some families with norms over heads
    decoder     the whole model or a stage of it; compiled, or compiled layer by layer

Experts. The balance loss is that of Switch (arXiv 2101.03961, equation 4) for several experts per token: E sum_e f_e
P_e, with f_e the share of tokens that expert e gets and P_e its mean probability. It is computed for each layer alone,
so that a stage of a pipeline can do so.

Positions. The two halves of a head are paired, as Hugging Face does. Linear scaling (2306.15595) divides all
frequencies. Llama 3.1 and YaRN (2309.00071) divide those that turn less than once in the original context, keep those
that turn often, and interpolate between the two.

Documents. The token that ends a document opens the next one: it sees nothing of the document before it, and the tokens
after it see it. So every target is predicted from its own document, the first token of one from the opening token
alone, as when a text is generated, and the loss counts all targets. Positions do not restart: rotary attention depends
on differences of positions only.

Letters in comments: B sequences, T tokens, S tokens of all sequences, W width, N heads, K heads of keys and values or
experts per token, D width of a head, E experts.
"""

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.adapter import adapt
from node.model.cache import KeyValueCache
from node.model.decoders.subspace import Subspace
from node.model.interface import Block, LanguageModel, ModelFamily, logits_of
from node.model.products import has_bf16, join_rows, multiply, require_fp8_sizes
from node.model.shapes import WHOLE, Cut
from optim.experts import add_tokens
from protocol.errors import DeviceError
from protocol.manifest.model import ModelSection, RopeScaling

logger = logging.getLogger(__name__)
Flex = Callable[..., Tensor]


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


def multiply_jointly(values: Tensor, in_fp8: bool, *matrices: nn.Module) -> Tensor:
    """Return the products of values (..., K) with several matrices, one after the other: (..., all rows)."""
    plain = [matrix.weight for matrix in matrices if isinstance(matrix, Linear)]
    if len(plain) < len(matrices):  # frozen ones, with adapters
        return torch.cat([matrix(values) for matrix in matrices], dim=-1)
    return multiply(values, join_rows(*plain), in_fp8)


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
        gate, up = multiply_jointly(stream, self.in_fp8, self.gate_proj, self.up_proj).chunk(2, dim=-1)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


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


def rotary_tables(config: ModelSection) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (context, D/2) of position * frequency, in fp32."""
    half = config.head_width // 2
    frequencies = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    scaling = config.rope_scaling
    if scaling is not None:
        frequencies = scaled(frequencies, config.rope_theta, scaling)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float64), frequencies)
    length = 1.0 if scaling is None else length_factor(scaling)
    return (angles.cos() * length).float(), (angles.sin() * length).float()


def scaled(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the frequencies (D/2,) after scaling, in fp64."""
    match scaling.rope_type:
        case "linear":
            kept = torch.zeros_like(frequencies)
        case "llama3":
            kept = _kept_by_turns(frequencies, scaling)
        case "yarn":
            kept = _kept_by_index(len(frequencies), theta, scaling)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def length_factor(scaling: RopeScaling) -> float:
    """Return the factor of queries and keys that YaRN adds; 1 for the others."""
    if scaling.rope_type != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


def _kept_by_turns(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return for each frequency how much of it Llama 3.1 keeps: 1 if it turns often in the original context."""
    low, high = scaling.low_freq_factor or 0.0, scaling.high_freq_factor or 0.0
    turns = (scaling.original_max_position_embeddings or 0) * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _kept_by_index(half: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return for each frequency how much of it YaRN keeps: a ramp over the index, between two numbers of turns."""

    def index_of(turns: float) -> float:
        length = scaling.original_max_position_embeddings or 0
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index_of(scaling.beta_fast or 32.0), index_of(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first if first != last else 0.001
    return 1 - ((torch.arange(half, dtype=torch.float64) - first) / width).clamp(0, 1)


class DocumentAttention(Protocol):
    """Causal attention within the documents of the tokens that it saw last."""

    def see(self, tokens: Tensor) -> None:
        """Take note of the token ids (B, T) of a pass, before its first layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply attention to `query` (B, N, T, D), `key` and `value` (B, K, T, D); return (B, N, T, D)."""


def number_documents(tokens: Tensor, end: int) -> Tensor:
    """Return the number of the document of each token (B, T); documents end with the token `end`."""
    return torch.cumsum(tokens == end, dim=1)


class DenseDocuments:
    """Attention with a mask (B, 1, T, T) of all pairs, for every device; the future may be hidden elsewhere."""

    def __init__(self, end: int, hides_future: bool = True) -> None:
        self._end = end
        self._hides_future = hides_future
        self.mask = torch.empty(0)

    def see(self, tokens: Tensor) -> None:
        numbers = number_documents(tokens, self._end)
        is_same = (numbers[:, :, None] == numbers[:, None, :])[:, None]
        self.mask = is_same.tril() if self._hides_future else is_same

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.shape[1] != query.shape[1]:  # the kernels with a mask know no groups
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)


class BlockDocuments:
    """Attention that skips blocks of pairs of different documents (flex attention)."""

    def __init__(self, end: int, flex: Flex) -> None:
        self._end = end
        self._flex = flex
        self._blocks: Any = None

    def see(self, tokens: Tensor) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        numbers, (batch, length) = number_documents(tokens, self._end), tokens.shape

        def is_seen(sequence: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (numbers[sequence, query] == numbers[sequence, key])

        self._blocks = create_block_mask(is_seen, batch, None, length, length, device=tokens.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = key.shape[1] != query.shape[1]
        return self._flex(query, key, value, block_mask=self._blocks, enable_gqa=grouped)


def choose_document_attention(end: int, device: torch.device | str, head_width: int) -> DocumentAttention:
    """Return the faster attention that works on the device."""
    device = torch.device(device)
    flex = compiled_flex(device, head_width) if device.type == "cuda" else None
    return DenseDocuments(end) if flex is None else BlockDocuments(end, flex)


@cache
def compiled_flex(device: torch.device, head_width: int) -> Flex | None:
    """Return flex attention, compiled; `None` if a small pass of it fails here, after one line."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Flex = torch.compile(flex_attention, dynamic=False)
    trial = BlockDocuments(0, compiled)
    try:
        trial.see(torch.zeros(1, 128, dtype=torch.int64, device=device))
        heads = torch.randn(1, 1, 128, head_width, device=device, requires_grad=True)
        torch.autograd.backward(trial.attend(heads, heads, heads).sum())
    except Exception as error:  # a compiler that is missing or fails raises errors of many kinds
        reason = " ".join(str(error).split())[:200]
        logger.warning("attention within documents uses a full mask: %s: %s", type(error).__name__, reason)
        return None
    return compiled


class CausalAttention(nn.Module):
    """The part of attention without weights, shared by all layers: rotary positions, and which tokens are seen."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelSection, device: torch.device | str) -> None:
        super().__init__()
        for name, table in zip(("cosines", "sines"), rotary_tables(config), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)
        end = config.document_end
        self.documents = None if end is None else self.document_attention(end, device, config.head_width)
        self.cache: KeyValueCache | None = None  # of the present pass

    def document_attention(self, end: int, device: torch.device | str, head_width: int) -> DocumentAttention:
        """Build the attention within documents that end with the token `end`."""
        return choose_document_attention(end, device, head_width)

    def see(self, tokens: Tensor) -> None:
        """Take note of the token ids (B, T) of a pass, before its first layer."""
        if self.cache is not None:
            self.cache.see(tokens)
        elif self.documents is not None:
            self.documents.see(tokens)

    def rotate(self, heads: Tensor) -> Tensor:
        """Apply rotary positions to `heads` (B, T, N, D)."""
        if self.cache is not None:
            return apply_rotary(heads, self.cosines[self.cache.positions], self.sines[self.cache.positions])
        length = heads.shape[1]
        return apply_rotary(heads, self.cosines[:length], self.sines[:length])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply causal attention to `query` (B, N, T, D), `key` and `value` (B, K, T, D); return (B, N, T, D)."""
        if self.cache is not None:
            return self.cache.attend(query, key, value)
        if self.documents is not None:
            return self.documents.attend(query, key, value)
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class DenseCausalAttention(CausalAttention):
    """The same, for a model that is compiled as a whole."""

    def document_attention(self, end: int, device: torch.device | str, head_width: int) -> DocumentAttention:
        return DenseDocuments(end)


class CompiledCausalAttention(DenseCausalAttention):
    """The same, written for the compiler on a CPU."""

    future: Tensor

    def __init__(self, config: ModelSection, device: torch.device | str) -> None:
        super().__init__(config, device)
        future = torch.full((config.context, config.context), -math.inf, device=device).triu(1)
        self.register_buffer("future", future, persistent=False)

    def document_attention(self, end: int, device: torch.device | str, head_width: int) -> DocumentAttention:
        return DenseDocuments(end, hides_future=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Apply causal attention, written out: torch's fused one has a slow backward pass in bf16.

        softmax(s) v = exp(s - max s) v / sum exp(s - max s): this divides D values per token instead of T.
        """
        heads, length, depth = query.shape[1:]
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
        scores = (query / math.sqrt(depth) @ key.transpose(-1, -2)).float() + self.future[:length, :length]
        if isinstance(self.documents, DenseDocuments):
            scores = scores.masked_fill(~self.documents.mask, -math.inf)
        powers = torch.exp(scores - scores.detach().amax(dim=-1, keepdim=True))
        mixed = (powers.to(value.dtype) @ value).float() / powers.sum(dim=-1, keepdim=True)
        return mixed.to(value.dtype)


class Attention(HasProducts):
    """Grouped-query attention of one layer."""

    def __init__(self, config: ModelSection, causal: CausalAttention) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.key_heads
        queries, keys = config.head_width * self.heads, config.head_width * self.groups
        self.causal = causal
        self.q_proj = Linear(config.width, queries)
        self.k_proj = Linear(config.width, keys)
        self.v_proj = Linear(config.width, keys)
        self.o_proj = Linear(queries, config.stream_width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return what attention adds to the stream (B, T, W), or to its values in a subspace."""
        batch, length, _ = stream.shape
        heads, groups = self.heads, self.groups
        projected = multiply_jointly(stream, self.in_fp8, self.q_proj, self.k_proj, self.v_proj)
        split = projected.view(batch, length, heads + 2 * groups, -1)
        rotated = self.causal.rotate(self.normalize(split[:, :, : heads + groups]))
        query, key = torch.split(rotated.transpose(1, 2), [heads, groups], dim=1)  # (B, N, T, D), (B, K, T, D)
        value = split[:, :, heads + groups :].transpose(1, 2)
        mixed = self.causal.attend(query, key, value)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output

    def normalize(self, heads: Tensor) -> Tensor:
        """Return the heads of queries and keys (B, T, N + K, D) as they are."""
        return heads


class NormalizedAttention(Attention):
    """Attention with a norm over each head of queries and keys (QK-norm, arXiv 2302.05442)."""

    def __init__(self, config: ModelSection, causal: CausalAttention) -> None:
        super().__init__(config, causal)
        self.q_norm = RMSNorm(config.head_width, config.norm_epsilon)
        self.k_norm = RMSNorm(config.head_width, config.norm_epsilon)

    def normalize(self, heads: Tensor) -> Tensor:
        """Return the heads with unit mean square, times their gains; the norms run in fp32."""
        query, key = torch.split(heads.float(), [self.heads, self.groups], dim=2)
        return torch.cat((self.q_norm(query), self.k_norm(key)), dim=2).type_as(heads)


def apply_rotary(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + D/2}) by the angle of its position.

    Args:
        heads: (B, T, N, D).
        cosines, sines: (T, D/2), or (B, T, D/2) if the positions of rows differ.
    """
    first, second = heads.chunk(2, dim=-1)
    cosines, sines = cosines[..., None, :], sines[..., None, :]
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.type_as(heads)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the stream. Families with other layers derive theirs from it.

    `to_stream` maps what attention and MLP return, the values in a subspace if the model has one, to the stream.
    """

    def __init__(self, attention: Attention, mlp: nn.Module, config: ModelSection, subspace: Subspace | None) -> None:
        super().__init__()
        self.to_stream = nn.Identity() if subspace is None else subspace
        self.self_attn = attention
        self.mlp = mlp
        self._add_norms(config)

    def _add_norms(self, config: ModelSection) -> None:
        """Create the norms, in the order of the family's `norm_entries`."""
        self.input_layernorm = RMSNorm(config.width, config.norm_epsilon)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_epsilon)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the new stream; both (B, T, W)."""
        stream = stream + self.to_stream(self.self_attn(self.input_layernorm(stream)))
        stream = stream + self.to_stream(self.mlp(self.post_attention_layernorm(stream)))
        return stream


LayerBuilder = Callable[[ModelSection, CausalAttention, Subspace | None], DecoderLayer]


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
        self,
        family: ModelFamily,
        build_layer: LayerBuilder,
        config: ModelSection,
        device: torch.device | str = "cpu",
        cut: Cut = WHOLE,
    ) -> None:
        super().__init__(config, family.shape_table(config, cut), cut)
        blocks, self._causal = family.block_range(config, cut), self.attention_type(config, device)
        self.subspace = None if config.subspace is None else Subspace(config, device)
        numbers = range(max(0, blocks.start - 1), min(config.layers, blocks.stop - 1))
        with torch.device("meta"):
            layers = {number: build_layer(config, self._causal, self.subspace) for number in numbers}
            self.model = DecoderBody(config, cut, layers)
            has_output = cut.has_head and not config.tied
            self.lm_head = Linear(config.width, config.vocabulary) if has_output else None
            if config.adapter is not None:
                adapt(self.model.layers, config.adapter)
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
        if self.config.adapter is not None:
            raise DeviceError("a model with an adapter has no products in fp8; leave out --fp8")
        require_fp8_sizes(self.config)
        for module in self.model.layers.modules():
            if isinstance(module, HasProducts):
                module.in_fp8 = True

    def see(self, tokens: Tensor) -> None:
        """Take note of the documents in the token ids (B, T) of a pass."""
        self._causal.see(tokens)

    def new_cache(self, padding: Tensor, length: int) -> KeyValueCache | None:
        """Make a cache for texts of this model."""
        return KeyValueCache(padding, length, self.config.document_end)

    def next_logits(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Compute the logits (B, vocabulary) after the last of the token ids (B, T)."""
        self._causal.cache = cache
        try:
            return super().next_logits(tokens)
        finally:
            self._causal.cache = None

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
        return logits_of(*self.output_factors(stream))


class CompiledDecoder(Decoder):
    """The same model, compiled, its matrix products in bf16 where the device has that, its weights in fp32.

    `place`: where its weights are before they are dealt to several devices; else on `device`, which computes.
    """

    def __init__(
        self,
        family: ModelFamily,
        build_layer: LayerBuilder,
        config: ModelSection,
        device: torch.device | str = "cpu",
        place: torch.device | str | None = None,
    ) -> None:
        self._device_type, self._has_bf16 = torch.device(device).type, has_bf16(torch.device(device))
        self.attention_type = CompiledCausalAttention if self._device_type == "cpu" else DenseCausalAttention
        super().__init__(family, build_layer, config, device if place is None else place)
        for module in self.modules():
            if isinstance(module, SparseMlp):
                module.exclude_from_compiler()
        self._compile()

    def new_cache(self, padding: Tensor, length: int) -> KeyValueCache | None:
        """Make none: the program is compiled for windows of one size."""
        return None

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
