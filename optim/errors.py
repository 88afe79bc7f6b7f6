"""Errors in a method's name, its options, or a payload. All are ValueErrors with a one-line text."""


class OptimError(ValueError):
    """The base of this package's errors."""


class UnknownRecipe(OptimError):  # noqa: N818
    """No recipe has that name; the text names the nearest one."""


class UnknownOption(OptimError):  # noqa: N818
    """A component, kind or option does not exist, or a value is not allowed; the text says what is."""


class CodecError(OptimError):
    """A payload does not decode, or values cannot be encoded."""
