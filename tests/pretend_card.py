"""A card that is not there: tensors that say `cuda`, hold their values in main memory, and refuse what a card refuses.

A machine without a card thus finds tensors of both kinds in one operation, generators of the wrong device, and values
that the processor waits for. Kernels are those of the CPU, so results have a CPU's precision; `torch.autocast` is the
one of the CPU.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

CARD = torch.device("cuda")
GENERATOR = torch.Generator
READS = ("tolist", "cpu", "numpy", "__contains__")
MAY_INDEX_FROM_MAIN_MEMORY = ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")


class WrongDevice(Exception):  # noqa: N818
    """An operation that a card refuses."""


class CardTensor(torch.Tensor):
    """A tensor whose values `held` are in main memory, although it says that they are on a card."""

    waits: ClassVar[list[str]] = []  # places at which the processor waited for the card
    generators: ClassVar[list[torch.Generator]] = []  # of the card
    held: torch.Tensor
    device = property(lambda _: CARD)
    is_cuda = property(lambda _: True)
    is_cpu = property(lambda _: False)

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "CardTensor":
        made: CardTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CardTensor{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # lists and dictionaries of any kind
        cls, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = operation.name(), dict(kwargs or {})
        if name == "aten::_local_scalar_dense":
            cls.wait()
        elif name == "aten::copy_":
            if not isinstance(args[0], cls):
                cls.wait()
            operation(*tree_map(_held, args), **kwargs)
            return args[0]
        elif not name.startswith(MAY_INDEX_FROM_MAIN_MEMORY):
            _require_one_device(name, args, kwargs)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        made = tree_map(_on_card, operation(*tree_map(_held, args), **tree_map(_held, kwargs)))
        return return_and_correct_aliasing(operation, args, kwargs, made)  # type: ignore[no-untyped-call]

    @classmethod
    def wait(cls) -> None:
        """Note the place in our code at which the processor waits."""
        places = (frame for frame in reversed(traceback.extract_stack()) if "/tests/pretend_card" not in frame.filename)
        found = next((frame for frame in places if "site-packages" not in frame.filename), None)
        cls.waits.append(f"{found.filename.rpartition('/')[2]}:{found.name}" if found else "?")


def _held(value: Any) -> Any:
    return value.held if isinstance(value, CardTensor) else value


def _on_card(value: Any) -> Any:
    return CardTensor(value) if isinstance(value, torch.Tensor) else value


def _require_one_device(name: str, *arguments: Any) -> None:
    tensors = [each for each in tree_flatten(arguments)[0] if isinstance(each, torch.Tensor)]
    if any(not isinstance(each, CardTensor) and each.ndim for each in tensors):  # a number may be anywhere
        raise WrongDevice(f"{name} has tensors of a card and of main memory")


def _is_card(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Card(TorchFunctionMode):
    """Makes tensors on the card where the code asks for it, and takes them back."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if function is torch.is_autocast_enabled or function is torch.get_autocast_dtype:
            return function("cpu")
        if name in READS and args and isinstance(args[0], CardTensor):
            CardTensor.wait()
            return args[0].held.clone() if name == "cpu" else getattr(args[0].held, name)(*args[1:])
        if function == torch.Tensor.data.__set__ and isinstance(args[0], CardTensor):  # type: ignore[attr-defined]
            args[0].held = args[1].held
        if name in ("data_ptr", "untyped_storage") and isinstance(args[0], CardTensor):
            return function(args[0].held)
        if name == "to":
            return self._move(function, args, kwargs)
        device, generator = kwargs.get("device"), kwargs.get("generator")
        is_there = _is_card(device) or (bool(args) and isinstance(args[0], CardTensor))
        if generator is not None and is_there and not any(generator is own for own in CardTensor.generators):
            raise WrongDevice(f"{name} has a generator of another device")
        if not _is_card(device):
            return function(*args, **kwargs)
        if name in ("tensor", "as_tensor"):
            CardTensor.wait()  # values of Python are copied from memory that is not pinned
        kwargs["device"] = "cpu"
        made = function(*tree_map(_held, args), **kwargs)
        return made if isinstance(made, CardTensor) else CardTensor(made)

    def _move(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Do what `Tensor.to` does, across the two memories."""
        named = (*args[1:], kwargs.pop("device", None))
        target = next((each for each in named if isinstance(each, str | torch.device)), None)
        others = [each for each in args[1:] if not isinstance(each, str | torch.device)]
        if target is None or _is_card(target) == isinstance(args[0], CardTensor):
            return function(args[0], *others, **kwargs) if others or kwargs else args[0]
        CardTensor.wait()
        moved = function(_held(args[0]), *others, **(kwargs | {"copy": True}))
        return CardTensor(moved) if _is_card(target) else moved


class _Generators:
    """Stands for the class `torch.Generator`, and knows which ones are the card's."""

    def __new__(cls, device: object = "cpu") -> torch.Generator:  # type: ignore[misc]
        made = GENERATOR()
        if torch.device(str(device)).type == "cuda":
            CardTensor.generators.append(made)
        return made


@contextmanager
def pretended_card(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Pretend inside the context that a card is there; gives the list of the places that wait for it."""
    CardTensor.waits, CardTensor.generators = [], []
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    patch.setattr(torch, "Generator", _Generators)
    whole = torch.autocast
    patch.setattr(torch, "autocast", lambda _, *words, **named: whole("cpu", *words, **named))
    with _Card():
        yield CardTensor.waits
