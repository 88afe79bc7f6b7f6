"""Text files as a corpus: the user's own, or the standard library of the running Python.

The hash of its name decides whether a file belongs to training or to validation. So peers whose file sets differ a
little still never train on text that another peer holds out. A single file is split: its end is the validation text.

The standard library is about 12 MB of real text that every machine has. Its site-packages are excluded because they
depend on the machine, its tests because they are large, repetitive and the only files that are not UTF-8.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from node.data.corpus import Corpus, Shard, TokenArray, is_held_out
from node.data.tokenizer import TextTokenizer
from protocol.errors import DataError, MissingFileError

MAX_TEXT_BYTES = 2**30


def open_text(pattern: str, base: Path, tokenizer: TextTokenizer, validation_share: float) -> Corpus:
    """Open all files that match the glob `pattern`, relative to `base`, sorted by path."""
    if not pattern:
        raise DataError("data.path is empty; set it to a glob of text files, such as texts/**/*.txt")
    root = Path(base.anchor or "/") if Path(pattern).is_absolute() else base
    relative = str(Path(pattern).relative_to("/")) if Path(pattern).is_absolute() else pattern
    files = sorted(path for path in root.glob(relative) if path.is_file())
    if not files:
        raise MissingFileError(f"no file matches data.path {pattern!r} in {base}; name existing text files")
    return build_corpus(files, root, tokenizer, validation_share)


def build_corpus(files: Sequence[Path], root: Path, tokenizer: TextTokenizer, validation_share: float) -> Corpus:
    """Encode `files` and split them; their names relative to `root` decide which are held out."""
    total = sum(path.stat().st_size for path in files)
    if total > MAX_TEXT_BYTES:
        raise DataError(f"{total >> 20} MiB of text; above {MAX_TEXT_BYTES >> 20} MiB run `murmur tokenize` first")
    shards = [np.concatenate([tokenizer.encode(read_utf8(path)), tokenizer.end]) for path in files]
    names = [path.relative_to(root).as_posix().encode() for path in files]
    training, validation = _split_validation(shards, names, validation_share)
    if not len(training) or not len(validation):
        raise DataError(f"{files[0]} and the other files are empty; give files with text")
    return Corpus(training, validation, tokenizer.size)


def read_utf8(path: Path) -> str:
    """Read a text file; raises DataError or MissingFileError."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); convert it or leave it out") from error
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; fix it or leave it out") from error


def _split_validation(
    shards: list[Shard], names: list[bytes], validation_share: float
) -> tuple[TokenArray, TokenArray]:
    if len(shards) == 1:
        whole = TokenArray(shards)
        cut = len(whole) - max(1, int(len(whole) * validation_share))
        return whole.slice(0, cut), whole.slice(cut, len(whole))
    held_out = [is_held_out(name, validation_share) for name in names]
    if not any(held_out) or all(held_out):
        held_out = [index == 0 for index in range(len(names))]
    training = [shard for shard, is_out in zip(shards, held_out, strict=True) if not is_out]
    validation = [shard for shard, is_out in zip(shards, held_out, strict=True) if is_out]
    return TokenArray(training), TokenArray(validation)


EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
MAX_STDLIB_BYTES = 20_000_000


def open_stdlib(tokenizer: TextTokenizer, validation_share: float) -> Corpus:
    """Open the source files of the running Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _take_up_to(list_stdlib_files(root), MAX_STDLIB_BYTES)
    if not files:
        raise MissingFileError(f"this Python has no library sources in {root}; use data.source = 'text'")
    return build_corpus(files, root, tokenizer, validation_share)


def list_stdlib_files(root: Path) -> list[Path]:
    """List the .py files outside of EXCLUDED_DIRS, sorted by their path relative to `root`."""
    found = [path for path in root.rglob("*.py") if not EXCLUDED_DIRS.intersection(path.relative_to(root).parts)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _take_up_to(files: list[Path], max_bytes: int) -> list[Path]:
    """Return the first files that have at most `max_bytes` together."""
    chosen, total = [], 0
    for path in files:
        total += path.stat().st_size
        if total > max_bytes:
            break
        chosen.append(path)
    return chosen
