"""The two parts of a kind of model: a family, which computes from the manifest, and a torch module.

A family knows shapes, initial weights, Hugging Face names and memory without building anything. The module that it
builds is an ordinary one for torch, with parameters of the names in the shape table; their memory is one flat vector,
which exchange, checkpoints, clipping and the inner optimizers read and write as a whole.

The loss. The logits of a batch are larger than anything else in a small model with a large vocabulary: 8,192 tokens of
128 thousand words take 4 GB, and their gradient as much again. So a chunk of tokens has its logits, its loss and the
gradients of both factors computed before the next one begins, all in the forward pass, and nothing is computed twice. A
batch of at most a chunk takes the ordinary way, which is faster for it.

    loss = mean over the counted tokens of  log sum exp(h W^T) - (h W^T)[target]

Recomputation. A layer keeps some results for its backward pass; the others are computed again there:

    none        all activations
    selective   its input and the results of its matrix products; attention, norms, gates and positions run again
    full        its input; the layer runs again

The gradient has the same bits in all three. Attention keeps more than anything else in long contexts, and it is cheap
compared with the matrix products (docs/results/devices.md).

Stochastic rounding to bf16. A weight in bf16 has 8 significant bits, and an update is often less than half of the last
one: rounded to the nearest value, the weight never moves. Rounded up or down with the probability that keeps the mean,
it moves as far on average (arXiv 2010.06192).

Letters in comments: B sequences, T tokens, S tokens of all sequences, W width, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from node.model.adapter import FrozenWeights, adapter_table
from node.model.cache import KeyValueCache
from node.model.config_keys import ConfigKeys
from node.model.shapes import WHOLE, Cut, Entry, ShapeTable, deal_blocks, require_stages
from optim.kernels.vectors import slabs
from optim.layout import Span
from protocol.errors import DeviceError, ManifestError
from protocol.manifest.model import ModelSection

IGNORED: Final = -100  # a target that does not count, as in torch
CHUNK_VALUES: Final = {"cpu": 1 << 22, "cuda": 1 << 27, "mps": 1 << 25}  # logits of a chunk
MIN_CHUNK_TOKENS: Final = 512  # a chunk of fewer reads the output matrix too often
MAX_COMPILED_CHUNKS: Final = 8  # each is a part of the compiled program
Recompute = Literal["none", "selective", "full"]

_PRODUCTS: Final = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}
LOST_BITS: Final = 16
SLAB_VALUES: Final = 1 << 24
Block = Callable[[Tensor], Tensor]


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
        return F.cross_entropy(logits_of(hidden, weight).float(), targets, ignore_index=IGNORED)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, dtype, size, torch.is_grad_enabled()
        )
    return loss


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden (..., W) times the transposed matrix (V, W), which may be frozen in a narrower type."""
    return F.linear(hidden, weight if weight.requires_grad else weight.to(hidden.dtype))


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
        trains = differentiates and ctx.needs_input_grad[1]  # the output matrix of an adapter's model is frozen
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if trains else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            rows = hidden[part].to(dtype)
            values = F.log_softmax(F.linear(rows, matrix).float(), dim=-1)
            total -= (values.gather(1, labels[part]) * counted[part]).sum()
            if of_hidden is None:
                continue
            slopes = _slopes(values, labels[part]).to(dtype)
            of_hidden[part] = (slopes @ matrix) * counted[part]
            if of_weight is not None:
                _add_product(of_weight, slopes, rows * counted[part].to(dtype))
        count = counted.sum()
        ctx.save_for_backward(of_hidden, of_weight, count)
        ctx.weight_type = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, count = ctx.saved_tensors
        scale = gradients[0] / count
        whole = None if of_weight is None else of_weight.mul_(scale).to(ctx.weight_type)
        return of_hidden.mul_(scale), whole, None, None, None, None


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


def run_layer(layer: Callable[[Tensor], Tensor], stream: Tensor, recompute: Recompute) -> Tensor:
    """Return the new stream; without gradients nothing is kept in any case."""
    if recompute == "none" or not torch.is_grad_enabled():
        return layer(stream)
    contexts = noop_context_fn if recompute == "full" else partial(create_selective_checkpoint_contexts, _policy)
    new: Tensor = checkpoint(layer, stream, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return new


def _policy(_context: object, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class StochasticRounding:
    """Rounds with noise of its own; `seed` None draws one, so that peers do not round alike."""

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._generator = torch.Generator(device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def copy(self, values: Tensor, out: Tensor) -> None:
        """Round `values` (n,), fp32 on any device, into `out` (n,) bf16. Values that bf16 has keep their bits."""
        for slab in slabs(out.numel(), SLAB_VALUES):
            bits = values[slab].to(out.device, copy=True).view(torch.int32)
            noise = torch.empty_like(bits).random_(0, 1 << LOST_BITS, generator=self._generator)
            bits.add_(noise).bitwise_and_(-1 << LOST_BITS)
            out[slab].copy_(bits.view(torch.float32))


class LanguageModel(nn.Module, ABC):
    """A decoder in fp32 whose parameters are views of `flat` (numel,), in the order of `shapes`; all start at zero.

    A model that is cut into stages has the parameters and blocks of its stage only.

    Subclasses build their submodules on the device `meta` and then call `_place_parameters`. Matrix products run in
    fp32, or in bf16 under `torch.autocast`; norms, positions and the loss stay in fp32.
    """

    def __init__(self, config: ModelSection, shapes: ShapeTable, cut: Cut = WHOLE) -> None:
        super().__init__()
        self.config = config
        self.cut = cut
        self.shapes = shapes
        self.flat = torch.empty(0)
        self.rounding: StochasticRounding | None = None  # of weights that are kept in bf16
        self.recompute: Recompute = "none"  # what layers keep for the backward pass
        self._placed: tuple[nn.Parameter, ...] = ()
        self._gradient: Tensor | None = None
        self.gradient_memory: Tensor | None = None
        self._gradient_views: tuple[Tensor, ...] = ()

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks of the shape table in order: embedding, layers, head; of a cut, those of its stage.

        The embedding takes token ids (B, T), the head returns logits (B, T, vocabulary); the others map the residual
        stream (B, T, W) to itself.
        """

    def forward(self, inputs: Tensor, targets: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, vocabulary), or with `targets` the mean cross entropy in nats per token.

        A stage before the last returns the residual stream (B, T, S) and takes no targets. S is `config.stream_width`.

        Args:
            inputs: token ids (B, T) int64, T at most the context; after the first stage the residual stream (B, T, S).
            targets: (B, T) int64; those of `IGNORED` do not count.
            tokens: token ids, for a stage after the first one of a model with a subspace.
        """
        if targets is not None and not self.cut.has_head:
            raise ValueError("only the last stage has a loss")
        tokens = inputs if self.cut.has_embedding else tokens
        stream = inputs if self.cut.has_embedding else self.read_stream(inputs, tokens)
        if tokens is not None:
            self.see(tokens)
        for block in self.blocks[: -1 if self.cut.has_head else None]:
            stream = run_layer(block, stream, self.recompute) if stream.is_floating_point() else block(stream)
        if not self.cut.has_head:
            return self.write_stream(stream, tokens)
        hidden, matrix = self.output_factors(stream)
        if targets is None:
            return logits_of(hidden, matrix)
        loss = output_loss(hidden.flatten(0, 1), matrix, targets.flatten())
        extra = self.take_auxiliary_loss()
        return loss if extra is None else loss + (extra - extra.detach())

    @abstractmethod
    def output_factors(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the head's logits: the normalized stream (B, T, W) and the matrix (vocabulary, W)."""

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return the loss besides cross entropy of the last pass through the blocks, once; None if there is none.

        It has a gradient, but the loss that people see leaves it out. A stage before the last adds its gradient by
        itself.
        """
        return None

    def take_routed_tokens(self) -> tuple[int, ...]:
        """Return for each expert, block by block, the tokens that it was trained on since the last call."""
        return ()

    @property
    def layer_matrices(self) -> tuple[tuple[Span, tuple[int, ...]], ...]:
        """Return place and shape (..., rows, columns) of the matrices of the layers, without embedding and output."""
        if self.config.adapter is not None:
            return tuple(zip(self.shapes.layout.spans, self.shapes.shapes, strict=True))
        blocks = self.shapes.blocks[int(self.cut.has_embedding) : -1 if self.cut.has_head else None]
        names = {name for block in blocks for name in block}
        placed = zip(self.shapes.entries, self.shapes.layout.spans, strict=True)
        return tuple((span, shape) for (name, shape), span in placed if len(shape) > 1 and name in names)

    def see(self, tokens: Tensor) -> None:  # most models have nothing to note
        """Take note of the token ids (B, T) of a pass, before its first block."""

    def new_cache(self, padding: Tensor, length: int) -> KeyValueCache | None:
        """Make a cache for texts that this model continues; `None` if it has to read the whole window for each token.

        Args:
            padding: unused slots before each text, (B,) int64.
            length: slots of a row, for its padding and its tokens.
        """
        return None

    def next_logits(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Compute the logits (B, vocabulary) in fp32 after the last of the token ids (B, T), which follow the cache."""
        self.see(tokens)
        stream = tokens
        for block in self.blocks[:-1]:
            stream = block(stream)
        return logits_of(*self.output_factors(stream[:, -1:]))[:, 0].float()

    def read_stream(self, values: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the stream (B, T, W) of what a stage receives (B, T, S)."""
        return values

    def write_stream(self, stream: Tensor, tokens: Tensor | None) -> Tensor:
        """Return what a stage sends (B, T, S) of a stream (B, T, W)."""
        return stream

    def load_flat(self, flat: Tensor) -> None:
        """Copy all weights from `flat` (numel,), fp32 on any device."""
        if self.rounding is None:
            self.flat.copy_(flat)
        else:
            self.rounding.copy(flat, self.flat)

    def keep_bf16(self) -> None:
        """Keep the weights, and so their gradient, in bf16 from now on; they train under autocast only."""
        self.use_memory(self.flat.bfloat16())
        self.rounding = StochasticRounding(self.flat.device)

    def multiply_in_fp8(self) -> None:
        """Multiply the matrices of all layers in fp8 from now on. Raises DeviceError if the model cannot."""
        raise DeviceError("this model has no products in fp8; leave out --fp8")

    def use_memory(self, flat: Tensor, gradient: Tensor | None = None) -> None:
        """Take the weights from `flat` (numel,) without a copy, and put gradients into `gradient` if it is given."""
        for parameter, view in zip(self._placed, self.shapes.views(flat).values(), strict=True):
            parameter.data = view
        self.flat, self.gradient_memory = flat, gradient

    def hold_frozen(self, frozen: FrozenWeights) -> None:
        """Compute with these weights, which are not copied again if they are on the model's device."""
        frozen.place(self, self.flat.device)

    def give_up_flat(self) -> None:
        """Forget the flat vector, for a caller that gives each parameter memory of its own."""
        self.flat, self._placed = torch.empty(0), ()

    @property
    def flat_gradient(self) -> Tensor | None:
        """Return the gradients of all parameters as one vector (numel,); `None` before the first backward pass."""
        if all(parameter.grad is None for parameter in self._placed):
            return None
        return self.attach_gradient()

    def attach_gradient(self) -> Tensor:
        """Make every parameter's gradient a view of one vector (numel,) and return that vector.

        The next backward passes add to it in place. Gradients that autograd has allocated elsewhere are copied into it.
        """
        is_new = self._gradient is None
        if self._gradient is None:
            self._gradient = self._zero_gradient()
            self._gradient_views = tuple(self.shapes.views(self._gradient).values())
        for parameter, view in zip(self._placed, self._gradient_views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            elif not is_new:
                view.zero_()
            parameter.grad = view
        return self._gradient

    def _zero_gradient(self) -> Tensor:
        memory = self.gradient_memory
        return torch.zeros_like(self.flat) if memory is None else memory.zero_()

    def clear_gradient(self) -> None:
        """Drop all gradients and free their memory."""
        self._gradient, self._gradient_views = None, ()
        for parameter in self._placed:
            parameter.grad = None

    def _place_parameters(self, device: torch.device | str) -> None:
        """Replace the trained parameters by views of one new vector of zeros; others stay, and are frozen."""
        if self.config.adapter is not None:
            self.requires_grad_(False)
        self.flat = _zeros(self.shapes.numel, torch.device(device))
        for name, view in self.shapes.views(self.flat).items():
            module, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(module), attribute, nn.Parameter(view))
        self._placed = tuple(map(self.get_parameter, self.shapes.names))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep one flat vector when `to` and its relatives give each parameter new memory."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.flat = torch.cat([parameter.detach().flatten() for parameter in self._placed])
        for parameter, view in zip(self._placed, self.shapes.views(self.flat).values(), strict=True):
            parameter.data = view
        self._gradient = self.gradient_memory = None
        return self


def _zeros(numel: int, device: torch.device) -> Tensor:
    """Return zeros; on the CPU without touching their pages, which the weights of a trainer never need."""
    return torch.from_numpy(np.zeros(numel, np.float32)) if device.type == "cpu" else torch.zeros(numel, device=device)


class ModelFamily(ABC):
    """All models of one `model.kind`. Everything but `build` is arithmetic on the manifest."""

    kind: ClassVar[str]  # in the manifest
    title: ClassVar[str]  # for people
    config_keys: ClassVar[ConfigKeys | None] = None  # of its config.json; None: transformers does not know the model

    def require_fit(self, config: ModelSection) -> None:
        """Raise ManifestError if the manifest has keys that this family has no use for, or lacks some."""
        if config.experts is not None:
            reason = f"models of the kind {self.kind} have no experts; remove it, or write another model.kind"
            raise ManifestError(f"model.experts: {reason}", ("model", "experts"))

    @abstractmethod
    def blocks(self, config: ModelSection) -> Iterator[tuple[Entry, ...]]:
        """Yield names and shapes of the parameters, block by block: embedding, layers, head.

        A model can be cut between any two blocks. Tied weights appear once.
        """

    def block_range(self, config: ModelSection, cut: Cut) -> range:
        """Return the numbers of a cut's blocks; raises ManifestError if the model cannot be cut so."""
        require_stages(cut.stages, config.layers, config.tied)
        return deal_blocks(self.block_work(config), cut.stages, cut.speeds)[cut.stage]

    def block_work(self, config: ModelSection) -> tuple[float, ...]:
        """Return for each block the elements of the matrices that a token is multiplied with.

        Looking up an embedding costs nothing.
        """
        _, *blocks = self.blocks(config)
        head = config.vocabulary * config.width if config.tied else 0
        work = [math.fsum(self.matrix_work(config, entry) for entry in block) for block in blocks]
        return (0.0, *work[:-1], work[-1] + head)

    def matrix_work(self, config: ModelSection, entry: Entry) -> float:
        """Return the elements of a parameter that a token is multiplied with, on average; 0 if it is not a matrix."""
        _, shape = entry
        return float(math.prod(shape)) if len(shape) == 2 else 0.0

    def shape_table(self, config: ModelSection, cut: Cut) -> ShapeTable:
        """Return names, shapes and order of a cut's parameters."""
        blocks = tuple(self.blocks(config))
        if config.adapter is not None:
            return adapter_table(blocks, config.adapter)
        table = ShapeTable.from_blocks(blocks[number] for number in self.block_range(config, cut))
        if config.experts is None:
            return table
        return replace(table, experts=tuple(self.expert_number(name) for name in table.names))

    def expert_number(self, name: str) -> int:
        """Return the number of the expert that a parameter belongs to; -1 for none."""
        return -1

    @abstractmethod
    def build(self, config: ModelSection, device: torch.device | str = "cpu", cut: Cut = WHOLE) -> LanguageModel:
        """Build the module on `device`, with all weights zero."""

    @abstractmethod
    def build_compiled(self, config: ModelSection, device: torch.device | str = "cpu") -> LanguageModel:
        """Build the module for long runs on `device`: compiled at its first use, with matrix products in bf16."""

    @abstractmethod
    def build_layerwise(
        self, config: ModelSection, device: torch.device | str, place: torch.device | str
    ) -> LanguageModel:
        """Build the module with its weights on `place`, for long runs on several devices like `device`.

        Each layer is compiled by itself, so that its weights can be gathered before it and dropped after it.
        """

    @abstractmethod
    def first_values(self, config: ModelSection, entry: Entry) -> tuple[float, float]:
        """Return mean and standard deviation of a parameter's initial weights; one of the two is 0."""

    @abstractmethod
    def layer_activation_bytes(self, config: ModelSection) -> float:
        """Estimate the bytes that one sequence keeps for the backward pass of one layer in 16 bits."""

    def kept_bytes(self, config: ModelSection, recompute: Recompute) -> float:
        """Estimate the bytes that one sequence keeps of one layer until its backward pass, in 16 bits."""
        if recompute == "none":
            return self.layer_activation_bytes(config)
        input_bytes = 4.0 * config.width
        _, layer, *_ = self.blocks(config)
        results = math.fsum(self.matrix_work(config, entry) / entry[1][1] for entry in layer if len(entry[1]) == 2)
        return config.context * (input_bytes + (2.0 * results if recompute == "selective" else 0.0))

    @abstractmethod
    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Return the config.json with which transformers loads the exported weights, without ids of special tokens."""

    def hugging_face_weights(self, config: ModelSection, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that transformers loads, by its names; `views` are ours, by name."""
        return {self.hugging_face_name(name): view for name, view in views.items()}

    def hugging_face_name(self, name: str) -> str:
        """Return the name that transformers gives to this parameter."""
        return name
