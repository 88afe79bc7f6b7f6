"""What can be wrong with a method's name, its options, or a payload. All are ValueErrors with a one-line text."""


class OptimError(ValueError):
    """Base of the three."""


class UnknownRecipe(OptimError):  # noqa: N818
    """No recipe of that name; the text names the nearest one."""


class UnknownOption(OptimError):  # noqa: N818
    """No such part, kind or option, or a value that is not allowed; the text says what is."""


class CodecError(OptimError):
    """A payload that does not decode, or values that cannot be encoded."""
