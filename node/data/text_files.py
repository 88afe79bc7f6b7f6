"""Text files as a corpus: the user's own, or the standard library of the running Python.

The hash of its name decides whether a file belongs to training or to validation. So peers whose file sets differ a
little still never train on text that another peer holds out. A single file is split: its end is the validation text.

The standard library is about 12 MB of real text that every machine has. Its site-packages are excluded because they
depend on the machine, its tests because they are large, repetitive and the only files that are not UTF-8.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from node.data.corpus import Shard, SourceText, TokenArray, count_held_out, is_held_out
from node.data.skipped_rows import Fault, RowPass, SkipLog
from node.data.tokenizer import TextTokenizer
from protocol.errors import DataError, MissingFileError, describe_error
from protocol.manifest.sections import SourceSection

MAX_TEXT_BYTES = 2**30


def find_files(config: SourceSection, base: Path) -> tuple[list[Path], Path]:
    """Return the files of the source, sorted by path, and the folder that their names are relative to."""
    return find_stdlib_files() if config.source == "python-stdlib" else find_text_files(config.path, base)


def name_of(path: Path, root: Path) -> bytes:
    """Return the name of a file, which decides whether it is held out."""
    return path.relative_to(root).as_posix().encode(errors="surrogateescape")


def find_text_files(pattern: str, base: Path) -> tuple[list[Path], Path]:
    """Return the files that match the glob `pattern`, sorted by path, and the folder that names are relative to."""
    if not pattern:
        raise DataError("data.path is empty; set it to a glob of text files, such as texts/**/*.txt")
    is_absolute = Path(pattern).is_absolute()
    root = Path(base.anchor or "/") if is_absolute else base
    relative = str(Path(pattern).relative_to("/")) if is_absolute else pattern
    try:
        matches = sorted(root.glob(relative)) if relative != "." else [root]
        files = [path for path in matches if path.is_file()]
    except (ValueError, IndexError, NotImplementedError, RecursionError, OSError) as error:
        reason = describe_error(error).splitlines()[0]
        raise DataError(
            f"data.path {pattern!r} is not a glob of files ({reason}); write for example texts/**/*.txt"
        ) from error
    if not files:
        folder = next((path for path in matches if path.is_dir()), None)
        place = "" if is_absolute else f" in {base}"
        found = f"; {folder} is a folder, write for example {folder}/**/*.txt" if folder else ""
        advice = found or "; name existing text files"
        raise MissingFileError(f"no file matches data.path {pattern!r}{place}{advice}")
    return files, root


def open_files(
    config: SourceSection, base: Path, tokenizer: TextTokenizer, validation_share: float, log: SkipLog
) -> SourceText:
    """Encode the files of a source and split them; their names decide which are held out."""
    files, root = find_files(config, base)
    texts = read_files(files, RowPass(log, judged_from=None))
    encoded = {path: np.concatenate([tokenizer.encode(text), tokenizer.end]) for path, text in texts}
    names = [name_of(path, root) for path in encoded]
    training, validation = _split_validation(list(encoded.values()), names, validation_share)
    if not len(training) or not len(validation):
        raise DataError(f"{files[0]} and the other files are empty; give files with text")
    return SourceText(training, validation, tokenizer.size, config)


def read_files(files: Sequence[Path], row_pass: RowPass) -> Iterator[tuple[Path, str]]:
    """Yield the text of each file that can be used. Raises DataError if there are too few, or too much text."""
    total = sum(path.stat().st_size for path in files)
    if total > MAX_TEXT_BYTES:
        raise DataError(f"{total >> 20} MiB of text; above {MAX_TEXT_BYTES >> 20} MiB run `murmur tokenize` first")
    for path in files:
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            fault = Fault("bad UTF-8", f"not UTF-8 (byte {error.start}); convert it or leave it out")
            row_pass.skip(str(path), "", fault)
            continue
        except OSError as error:
            fault = Fault("unreadable file", f"cannot read it: {error.strerror}; fix it or leave it out")
            row_pass.skip(str(path), "", fault)
            continue
        row_pass.keep()
        yield path, text
    row_pass.finish()


def _split_validation(
    shards: list[Shard], names: list[bytes], validation_share: float
) -> tuple[TokenArray, TokenArray]:
    if len(shards) == 1:
        whole = TokenArray(shards)
        cut = len(whole) - count_held_out(len(whole), validation_share)
        return whole.slice(0, cut), whole.slice(cut, len(whole))
    held_out = choose_held_out(names, validation_share)
    training = [shard for shard, is_out in zip(shards, held_out, strict=True) if not is_out]
    validation = [shard for shard, is_out in zip(shards, held_out, strict=True) if is_out]
    return TokenArray(training), TokenArray(validation)


def choose_held_out(names: Sequence[bytes], validation_share: float) -> list[bool]:
    """Return which of several files are held out: at least one, and not all."""
    held_out = [is_held_out(name, validation_share) for name in names]
    if not any(held_out) or all(held_out):
        return [index == 0 for index in range(len(names))]
    return held_out


EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
MAX_STDLIB_BYTES = 20_000_000


def find_stdlib_files() -> tuple[list[Path], Path]:
    """Return the source files of the standard library, and their folder."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _take_up_to(list_stdlib_files(root), MAX_STDLIB_BYTES)
    if not files:
        raise MissingFileError(f"this Python has no library sources in {root}; use data.source = 'text'")
    return files, root


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
