"""Components of a researcher's own: the classes of a module that a method may be composed of, next to ours.

A class counts if the module defines it, it derives from one of BASES, and it is complete (not abstract).
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final

from optim.aggregation.base import AggregationRule
from optim.codecs.base import Codec
from optim.compose import REGISTRY, Registry
from optim.errors import OptimError
from optim.inner.base import InnerUpdateRule
from optim.outer import OuterOptimizer
from optim.schedules.exchange_schedule import EverySteps

BASES: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        "inner": InnerUpdateRule,
        "schedule": EverySteps,
        "codec": Codec,
        "aggregate": AggregationRule,
        "update": OuterOptimizer,
    }
)
OWN_NUMBERS: Final = range(128, 256)  # of codecs; ours are below


def extend_registry(modules: Iterable[ModuleType]) -> Registry:
    """Return the kinds of all components, with those of the modules.

    Raises:
        OptimError: a component cannot be used; the text says what to change.
    """
    found: dict[str, dict[str, type[Any]]] = {part: dict(kinds) for part, kinds in REGISTRY.items()}
    for module in modules:
        components = list(find_components(module))
        if not components:
            raise OptimError(f"{module.__name__} defines no component; derive a class from {_base_names()}")
        for part, component in components:
            if fault := declaration_fault(part, component):
                raise OptimError(f"{module.__name__}.{component.__name__}: {fault}")
            if component.kind in found[part]:
                raise OptimError(f"there are two components {part}.kind = {component.kind!r}; rename yours")
            found[part][component.kind] = component
    _require_different_numbers(found["codec"].values())
    return found


def find_components(module: ModuleType) -> Iterator[tuple[str, type[Any]]]:
    """Yield part and class of each component that a module defines."""
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__ and not inspect.isabstract(value):
            part = part_of(value)
            if part is not None and "kind" in vars(value):
                yield part, value


def part_of(component: type[Any]) -> str | None:
    """Return the part of a method that a class can be; None if it is not a component."""
    return next((part for part, base in BASES.items() if issubclass(component, base)), None)


def declaration_fault(part: str, component: type[Any]) -> str:
    """Return the fault in the declaration of a class; empty if a method can be composed of it."""
    kind = getattr(component, "kind", None)
    if not isinstance(kind, str) or not kind:
        return 'it needs a name: kind: ClassVar[str] = "..."'
    if not dataclasses.is_dataclass(component) or not component.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "decorate it with @dataclass(frozen=True, kw_only=True, config=STRICT) of pydantic.dataclasses"
    try:
        component()
    except (TypeError, ValueError) as error:
        return f"each option needs a default that it allows: {str(error).splitlines()[0]}"
    if part != "codec":
        return ""
    if getattr(component, "number", None) not in OWN_NUMBERS:
        return f"number: ClassVar[int] must be one from {OWN_NUMBERS[0]} to {OWN_NUMBERS[-1]}; it begins each payload"
    return "" if getattr(component, "version", None) in range(256) else "it needs version: ClassVar[int] = 1"


def _require_different_numbers(codecs: Iterable[type[Codec]]) -> None:
    by_number: dict[int, str] = {}
    for codec in codecs:
        other = by_number.setdefault(codec.number, codec.kind)
        if other != codec.kind:
            raise OptimError(f"codecs {other!r} and {codec.kind!r} have the same number {codec.number}; change one")


def _base_names() -> str:
    return ", ".join(base.__name__ for base in BASES.values())
