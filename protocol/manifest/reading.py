"""Read and check manifests; every error is one line that names the key and says what to fix."""

import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import (
    BaseModel,
    ValidationError,
)

from protocol.errors import ManifestError, MissingFileError
from protocol.fault_words import describe_value, shorten
from protocol.manifest.run import Manifest

MAX_MANIFEST_BYTES = 64 * 1024
MAX_DOTS_PER_LINE = 500  # because the time to parse a dotted key grows with the square of its parts
# Messages of Python's TOML parser that name its data structures, and our words for each.
TOML_FAULTS: Final = (
    (re.compile(r"Cannot declare \((?P<keys>.*?),?\) twice"), "table [{keys}] is defined twice; merge the two"),
    (re.compile(r"Cannot (overwrite a value|redefine namespace|define .*)"), "a key is defined twice; remove one"),
    (re.compile(r"Cannot mutate immutable namespace \((?P<keys>.*?),?\)"), "table [{keys}] is defined twice"),
    (re.compile(r".*set_int_max_str_digits.*"), "a number has thousands of digits"),
    (re.compile(r"Found invalid character '\\r'"), "a line ends in a carriage return alone"),
)
HUGGING_FACE_NAMES: Final = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "intermediate_size": "hidden",
    "max_position_embeddings": "context",
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "norm_epsilon",
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "normalize_experts",
    "router_aux_loss_coef": "balance_loss",
}  # of a config.json, and the keys of [model] that mean the same
TOML_PLACE = re.compile(r"\s*\(at (?:line (?P<line>\d+), column \d+|end of document)\)$")
MAX_READ_CHARACTERS = 200
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class ManifestText:
    """The text of a manifest, to find the line of a key, and the file or URL that it came from."""

    origin: str
    text: str

    def place(self, keys: Sequence[str]) -> str:
        """Return `key.path (line 7)`; without the line if the text has no such key or table."""
        path, line = shorten(".".join(key or '""' for key in keys)), self._line_of(keys)
        return f"{path} (line {line})" if line else path

    def fault(self, message: str) -> ManifestError:
        """Return an error that names the origin."""
        return ManifestError(f"{self.origin}: {message}")

    def fault_at(self, keys: Sequence[str], message: str) -> ManifestError:
        """Return an error that names the origin, the key and its line."""
        return self.fault(f"{self.place(keys)}: {message}")

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether the text has this key or table."""
        return self._line_of(keys) is not None

    def _line_of(self, keys: Sequence[str]) -> int | None:
        """Return the line of a key or, failing that, of its table: TOML's parser does not report lines."""
        wanted, table, found = ".".join(keys), "", None
        counts: Counter[str] = Counter()  # of the tables of each array
        for number, full_line in enumerate(self.text.splitlines(), 1):
            line = full_line[:MAX_READ_CHARACTERS]  # the time to match a hostile line grows with its square
            header = re.match(r"\s*(\[+)\s*([^\]]+?)\s*\]+", line)
            if header:
                table = header[2]
                if header[1] == "[[":
                    table = f"{header[2]}.{counts[header[2]]}"
                    counts[header[2]] += 1
                found = number if table == wanted else found
                continue
            key = re.match(r"\s*([A-Za-z0-9_.\-\"]+)\s*=", line)
            if key and ".".join(filter(None, (table, key[1].strip('"')))) == wanted:
                return number
        return found


def decode_text(text: bytes, origin: str) -> ManifestText:
    """Decode UTF-8. Raises ManifestError."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"{origin}: not valid TOML: byte {error.start} is not UTF-8 text; save the file as UTF-8"
        ) from error
    if decoded.startswith(BYTE_ORDER_MARK):
        raise ManifestError(f"{origin}: not valid TOML: it begins with a byte order mark; save it as UTF-8 without one")
    return ManifestText(origin, decoded)


def describe_toml_fault(error: ValueError) -> str:
    """Return what the TOML parser found, in words of our own where its words name its data structures."""
    message = str(error)
    place = TOML_PLACE.search(message)
    where = (f" (line {place['line']})" if place["line"] else " (at the end)") if place else ""
    message = TOML_PLACE.sub("", message)
    for pattern, words in TOML_FAULTS:
        if found := pattern.match(message):
            names = re.findall(r"'([^']*)'", found.groupdict().get("keys") or "")
            message = words.format(keys=".".join(names))
            break
    return shorten(f"{message[:1].lower()}{message[1:]}{where}", 200)


def describe_invalid_values(error: ValidationError, kind: type[BaseModel], text: ManifestText) -> ManifestError:
    """Return one fault on one line, preferring unknown keys: a missing key may be the same one misspelt."""
    faults = error.errors(include_url=False)
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    keys = tuple(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        noun = "table" if _is_table(fault["input"]) else "key"
        return text.fault(f"unknown {noun} {text.place(keys)}; {_hint(keys, kind)}")
    if fault["type"] == "missing":
        name = f"the table [{keys[0]}]" if len(keys) == 1 else ".".join(keys)
        return text.fault(f"{name} is missing; add it")
    message, value = describe_value(fault), fault["input"]
    is_rule = fault["type"] == "value_error" and isinstance(value, dict)  # about several keys, one of which it names
    if is_rule:
        first, _, rest = message.partition(" ")
        named = (*keys, *first.split("."))
        return text.fault_at(named, rest) if text.has(named) else text.fault_at(keys, message)
    if fault["type"] == "value_error" and isinstance(value, list | tuple):
        return text.fault_at(keys, message)  # it names the entry
    return text.fault_at(keys, f"{message}, got {'a table' if isinstance(value, dict) else shorten(_as_toml(value))}")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _as_toml(value: object) -> str:
    """Return a value as the manifest writes it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _hint(keys: tuple[str, ...], kind: type[BaseModel]) -> str:
    if keys[:2] == ("data", "sources") and keys[-1] in ("tokenizer", "validation_share"):
        return f"it is data.{keys[-1]}, for all sources"
    if keys[:-1] == ("model",) and keys[-1] in HUGGING_FACE_NAMES:
        return f"the key here is {HUGGING_FACE_NAMES[keys[-1]]}"
    known = _known_keys(keys[:-1], kind)
    near = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"


def _known_keys(tables: tuple[str, ...], kind: type[BaseModel]) -> list[str]:
    for table in tables:
        if table.isdecimal():  # of an array, whose tables are all alike
            continue
        field = kind.model_fields.get(table)
        section = _section_of(field.annotation) if field else None
        if section is None:
            return []
        kind = section
    return [field.alias or key for key, field in kind.model_fields.items()]


def _section_of(annotation: object) -> type[BaseModel] | None:
    """Return the table that a key holds, also if it may be absent."""
    options = (annotation, *get_args(annotation))
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def load_manifest(path: Path) -> Manifest:
    """Read a manifest from a file.

    Raises MissingFileError or ManifestError, one line that says what to fix.
    """
    return parse_manifest(read_manifest_bytes(path, MAX_MANIFEST_BYTES), str(path))


def read_manifest_bytes(path: Path, limit: int) -> bytes:
    """Read a file that may be a pipe, once, and at most one byte more than `limit`.

    Raises MissingFileError.
    """
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise MissingFileError(f"cannot read the manifest {path}: {reason}; name an existing file") from error


def parse_manifest(text: bytes, origin: str) -> Manifest:
    """Parse and check a manifest; `origin` names the text in errors."""
    return validate_manifest(*parse_manifest_values(text, origin))


def parse_manifest_values(text: bytes, origin: str) -> tuple[dict[str, Any], ManifestText]:
    """Parse a manifest's TOML without checking its values. Raises ManifestError."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{origin}: a manifest has at most {MAX_MANIFEST_BYTES} bytes; shorten it")
    decoded = decode_text(text, origin)
    try:
        if any(line.count(".") > MAX_DOTS_PER_LINE for line in decoded.text.splitlines()):
            raise ValueError(f"more than {MAX_DOTS_PER_LINE} dots on a line")
        return tomllib.loads(decoded.text), decoded
    except RecursionError as error:
        raise decoded.fault("not valid TOML: nested too deeply") from error
    except ValueError as error:  # not TOML, a number of thousands of digits
        raise decoded.fault(f"not valid TOML: {describe_toml_fault(error)}") from error


def validate_manifest(values: dict[str, Any], text: ManifestText) -> Manifest:
    """Check the values of a manifest; `text` names it, and the line of a key, in errors. Raises ManifestError."""
    try:
        # JSON mode lets arrays become tuples while every scalar stays strict.
        manifest = _validate(json.dumps(values, default=_refuse_date), text)
        _require_usable_weights(manifest, text)
        return manifest
    except RecursionError as error:
        raise text.fault("not valid TOML: nested too deeply") from error
    except ValueError as error:
        raise text.fault(f"not valid TOML: {error}") from error


def _require_usable_weights(manifest: Manifest, text: ManifestText) -> None:
    """Raise ManifestError for weights of sources that would never hold. A revision of a running run may make such."""
    data, target = manifest.data, manifest.target
    names = [source.name for source in data.sources]
    if data.weights is not None and sorted(data.weights) != sorted(names):
        raise text.fault_at(("data", "weights"), f"must name each source: {', '.join(names) or 'there is only one'}")
    for number, phase in enumerate(data.phases):
        if phase.share is not None and target.tokens is target.rounds is None:
            reason = "is a share of the target, which is missing; add target.tokens"
            raise text.fault_at(("data", "phases", str(number), "share"), reason)


def manifest_of_values(values: dict[str, Any], origin: str) -> Manifest:
    """Check the values of a manifest that a program has changed; `origin` names them in errors."""
    return validate_manifest(values, ManifestText(origin, ""))


def _validate(values: str, text: ManifestText) -> Manifest:
    try:
        return Manifest.model_validate_json(values)
    except ValidationError as error:
        raise describe_invalid_values(error, Manifest, text) from error


def _refuse_date(value: object) -> str:
    raise ValueError(f"no key takes a date or time; put {value} in quotes")
