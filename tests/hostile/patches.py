"""Replace methods of the product in this process, for hostile nodes and for rules that a control turns off."""

import functools
from collections.abc import Callable
from typing import Any

Replacement = Callable[..., Any]  # takes the original, then the arguments


def replaced(owner: Any, name: str, replacement: Replacement) -> None:
    """Replace a function of a class or module; the replacement gets the original as its first argument.

    Raises AttributeError if the product has no such function any more, so that an attack cannot rot unseen.
    """
    original = owner.__dict__[name] if name in getattr(owner, "__dict__", {}) else getattr(owner, name)
    is_property, is_class_method = isinstance(original, property), isinstance(original, classmethod)
    function = original.fget if is_property else original.__func__ if is_class_method else original

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return replacement(function, *arguments, **options)

    setattr(owner, name, property(call) if is_property else classmethod(call) if is_class_method else call)
