"""The two parts of a kind of model: a family, which computes from the manifest, and a torch module.

A family knows shapes, initial weights, Hugging Face names and memory without building anything. The module that it
builds is an ordinary one for torch, with parameters of the names in the shape table; their memory is one flat vector,
which exchange, checkpoints, clipping and the inner optimizers read and write as a whole.

Letters in comments: B sequences, T tokens, W width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.cut import WHOLE, Cut, deal_blocks, require_stages
from node.model.shapes import Entry, ShapeTable
from protocol.manifest import ModelSection

Block = Callable[[Tensor], Tensor]


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
        self._placed: tuple[nn.Parameter, ...] = ()
        self._gradient: Tensor | None = None
        self._gradient_views: tuple[Tensor, ...] = ()

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks of the shape table in order: embedding, layers, head; of a cut, those of its stage.

        The embedding takes token ids (B, T), the head returns logits (B, T, vocabulary); the others map the residual
        stream (B, T, W) to itself.
        """

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, vocabulary), or with `targets` the mean cross entropy in nats per token.

        A stage before the last returns the residual stream (B, T, W) and takes no targets.

        Args:
            inputs: token ids (B, T) int64, T at most the context; after the first stage the residual stream (B, T, W).
            targets: (B, T) int64.
        """
        if targets is not None and not self.cut.has_head:
            raise ValueError("only the last stage has a loss")
        stream = inputs
        for block in self.blocks:
            stream = block(stream)
        if targets is None:
            return stream
        return F.cross_entropy(stream.float().flatten(0, 1), targets.flatten())

    def load_flat(self, flat: Tensor) -> None:
        """Copy all weights from `flat` (numel,), fp32 on any device."""
        self.flat.copy_(flat)

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
            self._gradient = torch.zeros_like(self.flat)
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

    def clear_gradient(self) -> None:
        """Drop all gradients and free their memory."""
        self._gradient, self._gradient_views = None, ()
        for parameter in self._placed:
            parameter.grad = None

    def _place_parameters(self, device: torch.device | str) -> None:
        """Replace all parameters by views of one new vector of zeros."""
        self.flat = torch.zeros(self.shapes.numel, device=device)
        for name, view in self.shapes.views(self.flat).items():
            module, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(module), attribute, nn.Parameter(view))
        self._placed = tuple(self.parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep one flat vector when `to` and its relatives give each parameter new memory."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.flat = torch.cat([parameter.detach().flatten() for parameter in self._placed])
        for parameter, view in zip(self._placed, self.shapes.views(self.flat).values(), strict=True):
            parameter.data = view
        self._gradient = None
        return self


class ModelFamily(ABC):
    """All models of one `model.kind`. Everything but `build` is arithmetic on the manifest."""

    kind: ClassVar[str]  # in the manifest
    title: ClassVar[str]  # for people

    @abstractmethod
    def blocks(self, config: ModelSection) -> Iterator[tuple[Entry, ...]]:
        """Yield names and shapes of the parameters, block by block: embedding, layers, head.

        A model can be cut between any two blocks. Tied weights appear once.
        """

    def block_range(self, config: ModelSection, cut: Cut) -> range:
        """Return the numbers of a cut's blocks; raises ManifestError if the model cannot be cut so."""
        require_stages(cut.stages, config.layers, config.tied)
        return deal_blocks(tuple(self.blocks(config)), cut.stages)[cut.stage]

    def shape_table(self, config: ModelSection, cut: Cut) -> ShapeTable:
        """Return names, shapes and order of a cut's parameters."""
        blocks = tuple(self.blocks(config))
        return ShapeTable.from_blocks(blocks[number] for number in self.block_range(config, cut))

    @abstractmethod
    def build(self, config: ModelSection, device: torch.device | str = "cpu", cut: Cut = WHOLE) -> LanguageModel:
        """Build the module on `device`, with all weights zero."""

    @abstractmethod
    def build_compiled(self, config: ModelSection) -> LanguageModel:
        """Build the module for long runs on a CPU: compiled, with matrix products in bf16."""

    @abstractmethod
    def standard_deviation(self, config: ModelSection, name: str) -> float:
        """Return the standard deviation of a matrix's initial weights; vectors start at 1."""

    @abstractmethod
    def layer_activation_bytes(self, config: ModelSection) -> float:
        """Estimate the bytes that one sequence keeps for the backward pass of one layer in 16 bits."""

    @abstractmethod
    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Return the config.json with which transformers loads the exported weights, without ids of special tokens."""

    def hugging_face_name(self, name: str) -> str:
        """Return the name that transformers gives to this parameter."""
        return name
