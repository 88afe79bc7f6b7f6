"""Errors in a method's name, its options, or a payload. All are ValueErrors with a one-line text."""

from typing import Final

# The words for a refused value: those of the library that checks it, and ours.
PLAIN_WORDS: Final = (
    ("Value error, ", ""),
    ("Input should be", "must be"),
    ("a valid integer, got a number with a fractional part", "a whole number"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid string", "text"),
    ("a valid boolean", "true or false"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
)


def plain_words(message: str) -> str:
    """Return a message of the checking library in the words that the manifest's errors use."""
    for theirs, ours in PLAIN_WORDS:
        message = message.replace(theirs, ours)
    return message


class OptimError(ValueError):
    """The base of this package's errors."""


class UnknownRecipe(OptimError):  # noqa: N818
    """No recipe has that name; the text names the nearest one."""


class UnknownOption(OptimError):  # noqa: N818
    """A component, kind or option does not exist, or a value is not allowed; the text says what is."""


class CodecError(OptimError):
    """A payload does not decode, or values cannot be encoded."""
