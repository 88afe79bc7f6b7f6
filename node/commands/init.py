"""`murmur init`: write a first manifest with comments, from five questions or from flags.

The file is checked like any manifest before it is written, and its text names the commands that come next. The
organiser's key is created with the first manifest, because the run id contains its peer id.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import typer

from node.commands.capacity import estimate_needs
from node.daemon.checkpoints.tensor_file import write_file
from node.data.token_shards import HEADER_FILE
from node.data.tokenizer import FileTokenizer
from node.from_manifest import build_program
from node.model import shape_table
from node.model.memory_estimate import fixed_bytes, microbatch_bytes
from node.paths import organiser_key_path
from node.run_dir import read_json_if_whole
from node.units import format_bytes, format_count, parse_count
from protocol.errors import MurmurError, StorageError, UsageError
from protocol.identity import Identity
from protocol.manifest.model import ModelSection
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import NAME_PATTERN
from protocol.signing import fingerprint

STDLIB = "python-stdlib"
BYTES_VOCABULARY = 256
TOKENS_PER_PARAMETER = 20  # compute-optimal, arXiv 2203.15556
GLOB_CHARACTERS = "*?["


@dataclass(frozen=True)
class ModelSize:
    """A model and the batch and learning rate that suit it; sizes in elements, `context` and batch in tokens."""

    width: int
    layers: int
    heads: int
    hidden: int
    context: int
    batch_tokens: int
    microbatch: int
    learning_rate: str


SIZES = {
    "tiny": ModelSize(128, 4, 4, 344, 128, 2048, 16, "3e-3"),
    "small": ModelSize(256, 6, 8, 688, 256, 8192, 16, "2e-3"),
    "medium": ModelSize(512, 12, 8, 1376, 512, 32768, 8, "1e-3"),
    "large": ModelSize(768, 12, 12, 2048, 1024, 65536, 4, "6e-4"),
}


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """The command line of `murmur init`. `None` means not given: the command asks, or takes the default."""

    name: str | None = None
    description: str | None = None
    text: str | None = None
    size: str | None = None
    peers: int | None = None
    tokens: str | None = None
    tokenizer: str = ""
    organiser: str = ""
    licence: str = ""
    recipe: str = "frugal"
    public: bool = False


@dataclass(frozen=True)
class DataChoice:
    """The [data] table, and the number of token ids."""

    source: str
    path: str
    tokenizer: str
    vocabulary: int


def init(target: Path, options: InitOptions, ask: bool) -> None:
    """Write the manifest `target` and print the next commands.

    Args:
        ask: whether to ask for the values that the options leave open.

    Raises:
        UsageError: `target` exists, or a value cannot be used.
        MurmurError: the manifest would be invalid, or the tokenizer cannot be read.
    """
    if target.exists():
        raise UsageError(f"{target} exists; name another file, or remove it first")
    answers = _ask_questions(options, target) if ask else options
    key = Identity.load_or_create(_prepare_key_path())
    text = manifest_text(answers, target.resolve().parent, key.peer_id)
    manifest = parse_manifest(text.encode(), str(target))
    build_program(manifest)
    _write(target, text)
    for line in next_steps(target, manifest, organiser_key_path()):
        typer.echo(line)


def _prepare_key_path() -> Path:
    path = organiser_key_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"cannot create {path.parent}: {error.strerror}; set XDG_STATE_HOME") from error
    return path


def _write(target: Path, text: str) -> None:
    """Write the new file with the mode that other new files get."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, [text.encode()], mode=0o666)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror}; name another file") from error


def _ask_questions(options: InitOptions, target: Path) -> InitOptions:
    """Ask for each of the five values that has no flag, again if the answer cannot be used."""
    typer.echo("Five questions; Enter takes the value in brackets.")
    given = {field.name: getattr(options, field.name) for field in fields(options)}

    def check_text(answer: str) -> str:
        choose_data(answer, options.tokenizer, target.resolve().parent)
        return answer

    texts = f"a pattern such as texts/**/*.txt, a folder, hf:NAME of a data set, or {STDLIB}"
    questions: tuple[tuple[str, str, str, Callable[[str], object]], ...] = (
        ("name", "1. Name of the run", _default_name(target), check_name),
        ("description", "2. What is the run for? One sentence", "", str),
        ("text", f"3. Text to train on: {texts}", STDLIB, check_text),
        ("size", f"4. Size of the model: {_describe_sizes()}", "small", check_size),
        ("peers", "5. Number of peers to wait for before the first round", "2", parse_peers),
    )
    for field, question, default, check in questions:
        if given[field] is None:
            given[field] = typer.prompt(
                question, default=default, show_default=bool(default), value_proc=partial(_check_answer, check)
            )
    return InitOptions(**given)


def _check_answer(check: Callable[[str], object], answer: str) -> object:
    """Check an answer; typer asks again after its own error."""
    try:
        return check(answer)
    except MurmurError as error:
        raise typer.BadParameter(str(error)) from error


def check_name(name: str) -> str:
    """Return the name of a run. Raises UsageError."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"{name[:40]!r} is not a name; use a-z, 0-9, '-', '.' and '_', at most 64 characters")
    return name


def check_size(size: str) -> str:
    """Return the name of a size. Raises UsageError."""
    if size not in SIZES:
        raise UsageError(f"{size[:40]!r} is not a size; write one of {', '.join(SIZES)}")
    return size


def parse_peers(text: str) -> int:
    """Return a number of peers. Raises UsageError."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= 10_000:
        raise UsageError(f"{text[:40]!r} is not a number of peers; write one from 1 to 10000")
    return int(text)


def _describe_sizes() -> str:
    return ", ".join(f"{name} ({format_count(_parameters(size))})" for name, size in SIZES.items())


def _parameters(size: ModelSize, vocabulary: int = BYTES_VOCABULARY) -> int:
    model = ModelSection(
        vocabulary=vocabulary, width=size.width, layers=size.layers, heads=size.heads, hidden=size.hidden,
        context=size.context,
    )  # fmt: skip
    return shape_table(model).numel


def _default_name(target: Path) -> str:
    """Return the name of the manifest's file or folder, in the characters that a run's name may have."""
    stem = target.stem if target.stem != "run" else target.resolve().parent.name
    kept = "".join(char if char in "abcdefghijklmnopqrstuvwxyz0123456789-_." else "-" for char in stem.lower())
    return kept.strip("-_.")[:64] or "my-run"


def choose_data(text: str, tokenizer: str, folder: Path) -> DataChoice:
    """Return the data source that a text of the user means.

    Relative paths start in the working directory; the manifest in `folder` names the same files.

    Raises:
        UsageError: there is no such text.
        MissingFileError, DataError: the tokenizer cannot be read.
    """
    vocabulary = FileTokenizer(Path(tokenizer)).size if tokenizer else BYTES_VOCABULARY
    tokenizer = _from_folder(tokenizer, folder) if tokenizer else ""
    if text == STDLIB:
        return DataChoice(STDLIB, "", tokenizer, vocabulary)
    if text.startswith("hf:"):
        return DataChoice("hf", text.removeprefix("hf:"), tokenizer, vocabulary)
    path, from_folder = Path(text), _from_folder(text, folder)
    if (path / HEADER_FILE).is_file():
        found = read_json_if_whole(path / HEADER_FILE).get("vocabulary")
        return DataChoice("tokens", from_folder, tokenizer, found if isinstance(found, int) else vocabulary)
    if path.is_dir():
        return DataChoice("text", f"{from_folder}/**/*.txt", tokenizer, vocabulary)
    if path.is_file() or any(char in text for char in GLOB_CHARACTERS):
        return DataChoice("text", from_folder, tokenizer, vocabulary)
    raise UsageError(f"there is no text {path}; name files, a folder, hf:NAME of a data set, or {STDLIB}")


def _from_folder(path: str, folder: Path) -> str:
    return path if Path(path).is_absolute() else os.path.relpath(path, folder)


def manifest_text(options: InitOptions, folder: Path, organiser_key: str) -> str:
    """Return the manifest as commented TOML."""
    size, data = (
        SIZES[check_size(options.size or "small")],
        choose_data(options.text or STDLIB, options.tokenizer, folder),
    )
    peers = options.peers or 2
    default = TOKENS_PER_PARAMETER * _parameters(size, data.vocabulary)
    tokens = parse_count(options.tokens, "--tokens") if options.tokens else default
    steps = max(1, tokens // (size.batch_tokens * peers))
    values: dict[str, object] = {
        "name": check_name(options.name or "my-run"),
        "peers": peers,
        "key": organiser_key,
        "description": options.description or "",
        "organiser": options.organiser,
        "licence": options.licence,
        "source": data.source,
        "path": data.path,
        "tokenizer": data.tokenizer,
        "recipe": options.recipe,
    }
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    numbers = {"vocabulary": data.vocabulary, "tokens": tokens, "steps": steps, "warmup": max(1, steps // 50)}
    template = TEMPLATE + (PUBLIC_TEMPLATE if options.public else "")
    return "".join(_fill_line(line, quoted | vars(size) | numbers) for line in template.splitlines())


def _fill_line(line: str, values: Mapping[str, object]) -> str:
    """Fill in a line of the template, and align the comment behind a value."""
    code, separator, comment = line.partition("  # ")
    filled = code.format(**values)
    return f"{filled:<26}  # {comment}\n" if separator and "=" in code else f"{filled}{separator}{comment}\n"


PUBLIC_TEMPLATE = """
[admission]
mode = "tickets"  # only keys to which you give a ticket take part: murmur ticket RUN.toml KEY
"""

TEMPLATE = """\
# A run of Murmuration. All keys: docs/reference/manifest.md. Anyone who has this file can join.
# The run id is the hash of the values below without [about], so a change of any other value starts a new run.
# `murmur steer` changes the target, the learning rate and the deadlines of this run while it trains.

[run]
name = {name}
min_peers = {peers}  # peers that must be present before the first round
organiser_key = {key}  # this key may steer the run

[about]  # facts for people, shown on the page
description = {description}
organiser = {organiser}
licence = {licence}  # of the model, such as Apache-2.0

[model]  # a decoder-only transformer
vocabulary = {vocabulary}  # 256: the text is read as bytes
width = {width}
layers = {layers}
heads = {heads}
hidden = {hidden}
context = {context}  # tokens per sequence

[data]
source = {source}
path = {path}  # relative to this file; each peer needs the text itself
tokenizer = {tokenizer}  # empty: bytes

[train]
batch_tokens = {batch_tokens}  # per step on one peer
microbatch = {microbatch}  # sequences at once; a machine with little memory takes fewer by itself
learning_rate = {learning_rate}
warmup_steps = {warmup}
decay_steps = {steps}  # about the steps of one peer until the target

[method]
recipe = {recipe}  # others: murmur recipes

[target]
tokens = {tokens}  # of all peers together; the run ends there
"""


def next_steps(target: Path, manifest: Manifest, key: Path) -> list[str]:
    """Return the lines that follow a new manifest: the size of the run, and the commands to go on with."""
    cpu, cuda = (
        estimate_needs(manifest, "cpu").memory,
        fixed_bytes(manifest, "cuda") + microbatch_bytes(manifest, 1, "cuda"),
    )
    return [
        f"wrote {target}: run {manifest.run.name}, {format_count(shape_table(manifest.model).numel)} parameters, "
        f"{format_count(manifest.target.tokens or 0)} tokens",
        f"a peer needs at least {format_bytes(cpu)} on a CPU, or {format_bytes(cuda)} on a GPU",
        f"your key as organiser is {key}; keep a copy, because it alone can steer the run",
        f"its fingerprint, which volunteers compare, is {fingerprint(manifest.run.organiser_key)}",
        f"try it here:     murmur up {target} --peers 2 --rounds 5",
        f"open it:         murmur host {target} --http 0.0.0.0:8080 --listen /ip4/0.0.0.0/tcp/4001",
    ]
