"""A recipe with some options changed, as one word of a command line: `frugal:inner_steps=30,codec.k=32`."""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optim.compose import Registry, compose
from optim.errors import OptimError
from optim.method import Method
from optim.options import OptionValue
from optim.recipes import OptionTables
from protocol.errors import UsageError
from protocol.fault_words import shorten
from protocol.manifest.reading import describe_toml_fault


@dataclass(frozen=True)
class Variant:
    """A recipe and the options that differ from its own; `name` is the word of the user."""

    name: str
    recipe: str
    tables: OptionTables

    def compose(self, registry: Registry) -> Method:
        """Compose the method. Raises UsageError."""
        try:
            return compose(self.recipe, self.tables, registry)
        except OptimError as error:
            raise UsageError(str(error)) from error


def read_variant(text: str, registry: Registry) -> Variant:
    """Read a recipe with options.

    An option may go without its part where only one part of the recipe has it.

    Raises:
        UsageError: an option is not written so, or no part or several parts have it.
    """
    recipe, _, rest = text.partition(":")
    words = [word.partition("=") for word in split_options(rest)]
    if not all(equals and key and value for key, equals, value in words) or (":" in text and not words):
        raise UsageError(f"{shorten(text)!r}: write it like frugal:inner_steps=30 or diloco:codec.kind=int4,block=64")
    kinds = {key.removesuffix(".kind"): value.strip("\"'") for key, _, value in words if key.endswith(".kind")}
    tables: dict[str, dict[str, OptionValue]] = {}
    for key, _, value in words:
        part, name = _place_of(key, recipe, kinds, registry)
        tables.setdefault(part, {})[name] = parse_value(shorten(repr(f"{key}={value}")), value)
    return Variant(text, recipe, tables)


def merge_tables(first: OptionTables, then: OptionTables) -> OptionTables:
    """Return the options of both; one of the second replaces one of the first."""
    return {part: {**first.get(part, {}), **then.get(part, {})} for part in (*first, *then)}


def parse_overrides(texts: Sequence[str]) -> OptionTables:
    """Return tables of options from texts `part.option=value`, each value as in a manifest; text needs no quotes."""
    found: dict[str, dict[str, OptionValue]] = {}
    for option in texts:
        key, equals, text = option.partition("=")
        part, dot, name = key.partition(".")
        if not (equals and dot and part and name and text):
            raise UsageError(f"--set {option!r}: write it as part.option=value, such as codec.k=128")
        found.setdefault(part, {})[name] = parse_value(f"--set {shorten(repr(option))}", text)
    return found


def parse_value(option: str, text: str) -> OptionValue:
    """Return the value of an option as in a manifest, where text needs no quotes. Raises UsageError."""
    try:
        value: OptionValue = tomllib.loads(f"value = {text}")["value"]
    except RecursionError as error:
        raise UsageError(f"{option}: nested too deeply") from error
    except ValueError as error:
        if not isinstance(error, tomllib.TOMLDecodeError) or text.lstrip().startswith(("{", "[")):
            raise UsageError(f"{option}: not a TOML value: {describe_toml_fault(error)}") from error
        return text
    return value if isinstance(value, bool | int | float | str | dict | list) else text


def split_options(text: str) -> Iterator[str]:
    """Yield the options between commas; commas within brackets, braces and quotes belong to a value."""
    depth, start, quote = 0, 0, ""
    for place, char in enumerate(text):
        if quote or char in "\"'":
            quote = "" if char == quote else quote or char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


def _place_of(key: str, recipe: str, kinds: Mapping[str, str], registry: Registry) -> tuple[str, str]:
    """Return part and name of an option; `kinds` are those that the same variant chooses."""
    part, dot, name = key.partition(".")
    if dot:
        return part, name
    options = _options_by_part(recipe, kinds, registry)
    places = [part for part, names in options.items() if key in names]
    if len(places) == 1:
        return places[0], key
    if places:
        choices = " or ".join(f"{place}.{key}" for place in places)
        raise UsageError(f"several parts of {recipe} have an option {key!r}; write {choices}")
    near = difflib.get_close_matches(key, [name for names in options.values() for name in names], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"see `murmur recipes {recipe}`"
    raise UsageError(f"no part of {recipe} has an option {key!r}; {hint}")


def _options_by_part(recipe: str, kinds: Mapping[str, str], registry: Registry) -> Mapping[str, list[str]]:
    method = Variant(recipe, recipe, {}).compose(registry)
    variants = [method.at_round(number) for number in method.breakpoints]
    found: dict[str, list[str]] = {}
    for part, known in registry.items():
        used = {kinds[part]} if part in kinds else {getattr(variant, part).kind for variant in variants}
        found[part] = [field.name for kind in used & known.keys() for field in dataclasses.fields(known[kind])]
    return found
