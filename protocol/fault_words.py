"""Describe a value that pydantic refuses, in words of our own.

One table covers every kind of fault that the manifest, the options of a node and the messages of a run can have.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

MAX_SHOWN_CHARACTERS = 80
WORDS: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must have fewer digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text in quotes",
    "string_unicode": "must be UTF-8 text",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must have the form {pattern}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "set_type": "must be a list",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "dataclass_type": "must be a table",
    "path_type": "must be a path",
    "bytes_type": "must be bytes",
    "json_invalid": "is not JSON",
    "json_type": "is not JSON",
    "value_error": "{error}",
    "assertion_error": "{error}",
}
PATTERNS: Final[Mapping[str, str]] = {
    "^[a-z0-9][a-z0-9._-]{0,63}$": "must have 1 to 64 characters of a-z 0-9 . _ -, the first a letter or digit",
}


def describe_value(fault: ErrorDetails) -> str:
    """Return which values are allowed, such as `must be at least 1`."""
    context: dict[str, Any] = fault.get("ctx", {})
    if fault["type"] == "string_pattern_mismatch" and context["pattern"] in PATTERNS:
        return PATTERNS[context["pattern"]]
    return WORDS[fault["type"]].format(**context) if fault["type"] in WORDS else f"is not allowed ({fault['type']})"


def describe_faults(error: ValidationError) -> str:
    """Return the first fault with the name of its value, on one line."""
    fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, fault["loc"]))
    return shorten(f"{name or 'it'} {describe_value(fault)}", 3 * MAX_SHOWN_CHARACTERS)


def shorten(text: str, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return a text on one line, shortened for people."""
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= limit else shown[:limit] + "..."
