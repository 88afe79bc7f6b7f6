"""A Hugging Face data set, streamed through `datasets` (the `hf` extra), and the rows of its files.

The peer's key shuffles the files of the data set, and blocks of windows (`window_blocks`) mix their examples. The hash
of its text decides whether an example is held out. The first held-out examples, in the order of the data set, are the
validation text. This is the only source that reads from the network, unless the data set is a local folder.

Lines and Parquet are read here, every other format through `datasets`. A file of JSON lines or of text is read line by
line, so a damaged line costs that line only. The library reads blocks of rows; if one fails, the rest of its file is
skipped. A file on the network is read again from the row where it broke off.

A place in a file is a number from which its rows can be read. It is a byte in a file of lines and the number of a row
in Parquet, both of which are reached at once. A compressed file and the library read all rows before the place.
"""

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from node.data.chat import ChatEncoder
from node.data.corpus import PackedText, Shard, SourceText, TokenArray, is_held_out
from node.data.skipped_rows import Fault, RowPass, SkipLog, TooManyFaultsError
from node.data.tokenizer import TextTokenizer
from node.data.window_blocks import BlockStream, Document, RowPlace
from protocol.errors import DataError, MissingFileError, describe_error
from protocol.manifest.sections import SourceSection

MAX_ROW_BYTES = 2**26
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 60.0, 60.0)  # together below the trainer's watchdog
JSON_LINES_NAME = re.compile(r"\.(jsonl|ndjson)(\.(gz|bz2|xz))?$", re.IGNORECASE)
JSON_NAME = re.compile(r"\.json(\.(gz|bz2|xz))?$", re.IGNORECASE)
TEXT_NAME = re.compile(r"\.txt(\.(gz|bz2|xz))?$", re.IGNORECASE)
MAX_FIRST_LINE_BYTES = 2**20
PARQUET_BATCH_ROWS = 1024
_TOO_LONG = Fault("too long", f"the row is longer than {MAX_ROW_BYTES >> 20} MiB")
VALIDATION_TOKENS = 2**17
VALIDATION_EXAMPLES = 50_000  # searched for held-out text
TEXT_COLUMN = "text"  # the only column of text files
FILES_PER_FAULT = 20  # at least, for each one that is unreadable
_NO_TOKENS: Shard = np.empty(0, dtype=np.uint8)


FindText = Callable[[dict[str, Any], str], str | Fault]


class Row(NamedTuple):
    """A row of a file: the place of the next one, its own name, and its text or the reason why there is none."""

    next: int
    name: str
    content: str | Fault


class RowFile(Protocol):
    """One file of a data set."""

    @property
    def name(self) -> str:
        """Return the path or address."""

    def rows(self, start: int) -> Iterator[Row]:
        """Yield the rows from the place `start` on; 0 is the first."""


@dataclass(frozen=True)
class LinesFile:
    """A file with one row in each line, local or on the hub, perhaps compressed."""

    name: str
    column: str
    parse: Callable[[bytes, str], str | Fault]

    def rows(self, start: int) -> Iterator[Row]:
        """Yield the rows from the place `start` on."""
        with open_file(self.name, compression="infer") as file:
            for place, name, line in self._lines(file, start):
                if line is None or line.strip():
                    yield Row(place, name, _TOO_LONG if line is None else self.parse(line, self.column))

    def _lines(self, file: BinaryIO, start: int) -> Iterator[tuple[int, str, bytes | None]]:
        """Yield the place behind each line from `start` on, its name and its bytes, or None if it is too long."""
        if _is_compressed(self.name):
            for number, (_, line) in enumerate(_read_lines(file), 1):
                if number > start:
                    yield number, f"row {number}", line
            return
        file.seek(start)
        for number, (size, line) in enumerate(_read_lines(file), 1):
            yield start + size, f"row {number} after byte {start}" if start else f"row {number}", line


def open_file(name: str, compression: str | None = None) -> AbstractContextManager[BinaryIO]:
    """Open a local file, or one on the hub."""
    import fsspec  # comes with `datasets`

    opened: AbstractContextManager[BinaryIO] = fsspec.open(name, "rb", compression=compression)
    return opened


def _is_compressed(name: str) -> bool:
    from fsspec.utils import infer_compression

    return infer_compression(name) is not None


def has_json_lines(name: str) -> bool:
    """Return whether a file has a JSON object in each line. The name decides, and for `.json` the first line."""
    if JSON_LINES_NAME.search(name):
        return True
    if not JSON_NAME.search(name):
        return False
    with open_file(name, compression="infer") as file:
        try:
            return isinstance(json.loads(file.readline(MAX_FIRST_LINE_BYTES)), dict)
        except (ValueError, RecursionError):
            return False  # one JSON value over several lines; the library reads it


def _read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield the bytes read so far and the newest line of a file, which is None if it is too long."""
    size = 0
    while line := file.readline(MAX_ROW_BYTES):
        size += len(line)
        if len(line) < MAX_ROW_BYTES:
            yield size, line
            continue
        while not line.endswith(b"\n") and line:
            line = file.readline(MAX_ROW_BYTES)
            size += len(line)
        yield size, None


def parse_json_row(line: bytes, column: str, find: FindText | None = None) -> str | Fault:
    """Return the text of a line of JSON, or why it has none; `find` takes it from the values of the row."""
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Fault("bad UTF-8", f"not UTF-8 (byte {error.start})")
    except (ValueError, RecursionError) as error:
        return Fault("malformed row", f"not JSON ({describe_error(error)})")
    if not isinstance(values, dict):
        return Fault("malformed row", "not a JSON object")
    return (find or find_text)(values, column)


def parse_text_row(line: bytes, column: str) -> str | Fault:
    """Return a line of a text file, which has no columns, or why it is none."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return Fault("bad UTF-8", f"not UTF-8 (byte {error.start})")


def find_text(values: dict[str, Any], column: str) -> str | Fault:
    """Return the text in `column` of a row, or why there is none."""
    text = values.get(column)
    if column not in values:
        return Fault("missing column", f"no column {column!r}; set data.column: {', '.join(sorted(map(str, values)))}")
    if text is None:
        return Fault("null", f"no text in {column!r}, it is null")
    if not isinstance(text, str):
        return Fault("not text", f"no text in {column!r}, it is of type {type(text).__name__}; set data.column")
    if len(text) > MAX_ROW_BYTES:
        return _TOO_LONG
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Fault("bad UTF-8", f"not Unicode text (character {error.start})")
    return text


@dataclass(frozen=True)
class LibraryFile:
    """One shard of an IterableDataset."""

    name: str
    column: str
    examples: Any
    find: FindText = find_text

    def rows(self, start: int) -> Iterator[Row]:
        """Yield the rows from number `start` on."""
        for number, values in enumerate(self.examples.skip(start), start + 1):
            yield Row(number, f"row {number}", self.find(values, self.column))


@dataclass(frozen=True)
class ParquetRows:
    """A Parquet file, local or on the hub. Only the groups of rows from the wanted one on are read."""

    name: str
    column: str
    find: FindText = find_text

    def rows(self, start: int) -> Iterator[Row]:
        """Yield the rows from number `start` on."""
        from pyarrow import parquet  # comes with `datasets`

        with open_file(self.name) as opened, parquet.ParquetFile(opened) as file:
            if self.column not in file.schema_arrow.names:
                raise ValueError(f"no column {self.column!r}")
            number, end = 0, 0
            for group in range(file.num_row_groups):
                number, end = end, end + file.metadata.row_group(group).num_rows
                if end <= start:
                    continue
                for batch in file.iter_batches(PARQUET_BATCH_ROWS, [group], [self.column]):
                    first = max(0, start - number)
                    number += len(batch)
                    for index, text in enumerate(batch.column(0)[first:].to_pylist(), number - len(batch) + first + 1):
                        yield Row(index, f"row {index}", self.find({self.column: text}, self.column))


def read_rows(file: RowFile, start: int, sleep: Callable[[float], None] = time.sleep) -> Iterator[Row]:
    """Yield the rows of a file from `start` on; a Fault "unreadable file" ends a damaged one.

    Raises:
        DataError: A file on the network stays unreachable.
    """
    delays, place = iter(RETRY_SECONDS), f"place {start}" if start else "row 1"
    while True:
        try:
            for row in file.rows(start):
                yield row
                start, place, delays = row.next, f"after {row.name}", iter(RETRY_SECONDS)
            return
        except MemoryError:
            raise
        except OSError as error:
            if "://" not in file.name:
                yield _unreadable(start, place, error)
                return
            delay = next(delays, None)
            if delay is None:
                line = f"cannot read {file.name}: {first_line(error)}; check the network, or whether the data set moved"
                raise DataError(line) from error
            sleep(delay)
        except Exception as error:  # the library and its formats raise errors of many kinds
            yield _unreadable(start, place, error)
            return


def _unreadable(start: int, place: str, error: Exception) -> Row:
    return Row(start, place, Fault("unreadable file", f"cannot read on: {first_line(error)}"))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return describe_error(error).splitlines()[0]


def open_huggingface(
    config: SourceSection, base: Path, tokenizer: TextTokenizer | ChatEncoder, validation_share: float, log: SkipLog
) -> SourceText:
    """Open the folder `config.path` below `base` if it exists, else the data set of that name on the hub."""
    stream = open_examples(config, base, tokenizer, validation_share, log)
    return SourceText(stream, stream.validation(), tokenizer.size, config)


def open_examples(
    config: SourceSection, base: Path, tokenizer: TextTokenizer | ChatEncoder, validation_share: float, log: SkipLog
) -> "ExampleStream":
    """Open the data set without reading its examples."""
    find = tokenizer.find if isinstance(tokenizer, ChatEncoder) else find_text
    return ExampleStream(_open_files(config, base, find), config, tokenizer, validation_share, log)


@dataclass
class ExampleStream:
    """The examples of a data set."""

    files: list[RowFile]
    config: SourceSection
    tokenizer: TextTokenizer | ChatEncoder
    validation_share: float
    skip_log: SkipLog
    _unreadable: set[str] = field(default_factory=set)

    def windows(self, context: int, key: int, place: int) -> BlockStream:
        """Open the windows of `key` at `place`."""
        return BlockStream(self, context, key, place, self.tokenizer.end if self._packs else None)

    @property
    def _packs(self) -> bool:
        return isinstance(self.tokenizer, ChatEncoder)

    def documents(self, key: int, start: RowPlace) -> Iterator[Document]:
        """Yield the documents to train on without end; one with no tokens marks the end of each epoch."""
        for epoch in itertools.count(start.epoch):
            files, tokens = _shuffle(self.files, key, epoch), 0
            for next_place, text in self._texts(files, start if epoch == start.epoch else RowPlace(epoch, 0, 0)):
                if not self.is_held_out(text):
                    tokens += len(document := self.encode(text))
                    yield Document(document, next_place)
            if not tokens and (epoch > start.epoch or start.file == start.row == 0):
                raise DataError(f"{self.config.path} holds no text to train on; name another split or column")
            yield Document(_NO_TOKENS, RowPlace(epoch + 1, 0, 0))

    def texts(self) -> Iterator[str]:
        """Yield the text of each usable example in the order of the data set."""
        return (text for _, text in self._texts(self.files, RowPlace(0, 0, 0)))

    def validation(self) -> TokenArray | PackedText:
        """Collect the tokens of the first held-out examples."""
        shards: list[Shard] = []
        tokens = 0
        for text in itertools.islice(self.texts(), VALIDATION_EXAMPLES):
            if self.is_held_out(text):
                shards.append(self.encode(text))
                tokens += len(shards[-1])
            if tokens >= VALIDATION_TOKENS:
                break
        return PackedText(shards, self.tokenizer.end) if self._packs else TokenArray(shards)

    def is_held_out(self, text: str) -> bool:
        """Return whether an example is kept for validation."""
        return is_held_out(text.encode(), self.validation_share)

    def encode(self, text: str) -> Shard:
        """Return the tokens of an example and the end of a document."""
        return np.concatenate([self.tokenizer.encode(text), self.tokenizer.end])

    def _texts(self, files: list[RowFile], start: RowPlace) -> Iterator[tuple[RowPlace, str]]:
        """Yield the usable rows from `start` to the end of the epoch, each with the place of the next row."""
        epoch_pass = RowPass(self.skip_log)
        for index in range(start.file, len(files)):
            first = start.row if index == start.file else 0
            for place, text in self._texts_of_file(files[index], first, epoch_pass):
                yield RowPlace(start.epoch, index, place), text
        if start.file == start.row == 0:
            epoch_pass.finish()

    def _texts_of_file(self, file: RowFile, first: int, epoch_pass: RowPass) -> Iterator[tuple[int, str]]:
        """Yield the usable rows of a file, each with the place of the next row.

        Of many files, one with too many faults counts as unreadable as a whole.
        """
        has_many = len(self.files) >= FILES_PER_FAULT
        row_pass = RowPass(self.skip_log) if has_many else epoch_pass
        try:
            for place, name, content in read_rows(file, first):
                if isinstance(content, Fault):
                    row_pass.skip(file.name, name, content)
                    if content.reason == "unreadable file":
                        self._count_unreadable(file, f"{file.name} {name}: {content.text}")
                    continue
                row_pass.keep()
                yield place, content
            if has_many and first == 0:
                row_pass.finish()
        except TooManyFaultsError as error:
            if not has_many:
                raise
            self._count_unreadable(file, str(error))

    def _count_unreadable(self, file: RowFile, reason: str) -> None:
        self._unreadable.add(file.name)
        if len(self._unreadable) * FILES_PER_FAULT > len(self.files):
            count = f"{len(self._unreadable)} of {len(self.files)} files"
            raise DataError(f"{reason}; {count} are unreadable, repair or remove them")


def _shuffle(files: list[RowFile], key: int, epoch: int) -> list[RowFile]:
    words = np.random.Philox(key=key, counter=epoch).random_raw(len(files))
    return [files[index] for index in np.argsort(words, kind="stable")]


def _open_files(config: SourceSection, base: Path, find: FindText) -> list[RowFile]:
    try:
        import datasets
        from datasets.packaged_modules.parquet.parquet import ParquetConfig
    except ImportError as error:
        raise DataError(
            "data.source = 'hf' needs the package datasets; install it: pip install 'murmuration[hf]'"
        ) from error
    if not config.path:
        raise DataError("data.path is empty; set it to the folder or the name of a data set")
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # our own line is enough
    folder = base / config.path
    if os.path.isfile(folder):  # unlike Path.is_file, it accepts any text
        raise DataError(f"data.path {config.path!r} is a file; name the folder with the data set")
    try:
        builder = datasets.load_dataset_builder(str(folder) if os.path.exists(folder) else config.path)
        if isinstance(builder.config, ParquetConfig):
            _read_only_the_column(builder, config)
        return _list_files(builder, config, find)
    except FileNotFoundError as error:
        raise MissingFileError(f"no data set {config.path!r}: {first_line(error)}; fix data.path") from error
    except (MemoryError, DataError):
        raise
    except Exception as error:  # the library and its formats raise errors of many kinds
        raise DataError(
            f"cannot open the data set {config.path!r}: {first_line(error)}; fix data.path or data.split"
        ) from error


def _read_only_the_column(builder: Any, config: SourceSection) -> None:
    """Make the library ignore all other columns, in which the files may differ."""
    available = builder.as_streaming_dataset(split=config.split).column_names or [config.column]
    if config.column not in available:
        columns = ", ".join(sorted(available))
        raise DataError(f"{config.path} has no column {config.column!r}; set data.column: {columns}")
    builder.config.columns = [config.column]


def _list_files(builder: Any, config: SourceSection, find: FindText) -> list[RowFile]:
    """Return the files of the split, each with its reader."""
    from datasets.packaged_modules.parquet.parquet import ParquetConfig

    names = [str(name) for name in (builder.config.data_files or {}).get(config.split, ())]
    asked = names[:1] if names and "://" in names[0] else names  # each answer of the hub takes a moment
    if asked and all(has_json_lines(name) for name in asked):
        return [LinesFile(name, config.column, partial(parse_json_row, find=find)) for name in names]
    if names and all(TEXT_NAME.search(name) for name in names) and config.column == TEXT_COLUMN:
        return [LinesFile(name, config.column, parse_text_row) for name in names]
    if names and isinstance(builder.config, ParquetConfig):
        return [ParquetRows(name, config.column, find) for name in names]
    examples = builder.as_streaming_dataset(split=config.split)
    count = examples.num_shards
    if len(names) != count:
        names = [f"{config.path} part {index + 1}" for index in range(count)]
    return [LibraryFile(name, config.column, examples.shard(count, index), find) for index, name in enumerate(names)]
