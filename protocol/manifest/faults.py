"""Say what is wrong with a manifest: its file, the key, the line, and what to write instead."""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

from pydantic import BaseModel, ValidationError

from protocol.errors import ManifestError
from protocol.fault_words import describe_value, shorten

# Messages of Python's TOML parser that name its own data structures, and the words for each.
TOML_FAULTS: Final = (
    (re.compile(r"Cannot declare \((?P<keys>.*?),?\) twice"), "the table [{keys}] is there twice; merge the two"),
    (re.compile(r"Cannot (overwrite a value|redefine namespace|define .*)"), "a key is there twice; remove one"),
    (re.compile(r"Cannot mutate immutable namespace \((?P<keys>.*?),?\)"), "the table [{keys}] is there twice"),
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
