"""A Hugging Face data set, streamed through `datasets` (the `hf` extra).

The peer's key shuffles the files of the data set, and blocks of windows (`window_blocks`) mix their examples. The hash
of its text decides whether an example is held out. The first held-out examples, in the order of the data set, are the
validation text. This is the only source that reads from the network, unless the data set is a local folder.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from node.data.corpus import Shard, SourceText, TokenArray, is_held_out
from node.data.row_files import (
    TEXT_NAME,
    LibraryFile,
    LinesFile,
    ParquetRows,
    RowFile,
    first_line,
    has_json_lines,
    parse_json_row,
    parse_text_row,
    read_rows,
)
from node.data.skipped_rows import Fault, RowPass, SkipLog, TooManyFaultsError
from node.data.tokenizer import TextTokenizer
from node.data.window_blocks import BlockStream, Document, Place
from protocol.errors import DataError, MissingFileError
from protocol.manifest.sections import SourceSection

VALIDATION_TOKENS = 2**17
VALIDATION_EXAMPLES = 50_000  # searched for held-out text
TEXT_COLUMN = "text"  # the only column of text files
FILES_PER_FAULT = 20  # one in so many files may be unreadable
_NO_TOKENS: Shard = np.empty(0, dtype=np.uint8)


def open_huggingface(
    config: SourceSection, base: Path, tokenizer: TextTokenizer, validation_share: float, log: SkipLog
) -> SourceText:
    """Open the folder `config.path` below `base` if it exists, else the data set of that name on the hub."""
    stream = open_examples(config, base, tokenizer, validation_share, log)
    return SourceText(stream, stream.validation(), tokenizer.size, config)


def open_examples(
    config: SourceSection, base: Path, tokenizer: TextTokenizer, validation_share: float, log: SkipLog
) -> "ExampleStream":
    """Open the data set without reading its examples."""
    return ExampleStream(_open_files(config, base), config, tokenizer, validation_share, log)


@dataclass
class ExampleStream:
    """The examples of a data set."""

    files: list[RowFile]
    config: SourceSection
    tokenizer: TextTokenizer
    validation_share: float
    skip_log: SkipLog
    _unreadable: set[str] = field(default_factory=set)

    def windows(self, context: int, key: int, place: int) -> BlockStream:
        """Open the windows of `key` at `place`."""
        return BlockStream(self, context, key, place)

    def documents(self, key: int, start: Place) -> Iterator[Document]:
        """Yield the documents to train on without end; one with no tokens marks the end of each epoch."""
        for epoch in itertools.count(start.epoch):
            files, tokens = _shuffle(self.files, key, epoch), 0
            for next_place, text in self._texts(files, start if epoch == start.epoch else Place(epoch, 0, 0)):
                if not self.is_held_out(text):
                    tokens += len(document := self.encode(text))
                    yield Document(document, next_place)
            if not tokens and (epoch > start.epoch or start.file == start.row == 0):
                raise DataError(f"{self.config.path} holds no text to train on; name another split or column")
            yield Document(_NO_TOKENS, Place(epoch + 1, 0, 0))

    def texts(self) -> Iterator[str]:
        """Yield the text of each usable example in the order of the data set."""
        return (text for _, text in self._texts(self.files, Place(0, 0, 0)))

    def validation(self) -> TokenArray:
        """Collect the tokens of the first held-out examples."""
        shards: list[Shard] = []
        tokens = 0
        for text in itertools.islice(self.texts(), VALIDATION_EXAMPLES):
            if self.is_held_out(text):
                shards.append(self.encode(text))
                tokens += len(shards[-1])
            if tokens >= VALIDATION_TOKENS:
                break
        return TokenArray(shards)

    def is_held_out(self, text: str) -> bool:
        """Return whether an example is kept for validation."""
        return is_held_out(text.encode(), self.validation_share)

    def encode(self, text: str) -> Shard:
        """Return the tokens of an example and the end of a document."""
        return np.concatenate([self.tokenizer.encode(text), self.tokenizer.end])

    def _texts(self, files: list[RowFile], start: Place) -> Iterator[tuple[Place, str]]:
        """Yield the usable rows from `start` to the end of the epoch, each with the place of the next row."""
        epoch_pass = RowPass(self.skip_log)
        for index in range(start.file, len(files)):
            first = start.row if index == start.file else 0
            for place, text in self._texts_of_file(files[index], first, epoch_pass):
                yield Place(start.epoch, index, place), text
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


def _open_files(config: SourceSection, base: Path) -> list[RowFile]:
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
        return _list_files(builder, config)
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


def _list_files(builder: Any, config: SourceSection) -> list[RowFile]:
    """Return the files of the split, each with its reader."""
    from datasets.packaged_modules.parquet.parquet import ParquetConfig

    names = [str(name) for name in (builder.config.data_files or {}).get(config.split, ())]
    asked = names[:1] if names and "://" in names[0] else names  # each answer of the hub takes a moment
    if asked and all(has_json_lines(name) for name in asked):
        return [LinesFile(name, config.column, parse_json_row) for name in names]
    if names and all(TEXT_NAME.search(name) for name in names) and config.column == TEXT_COLUMN:
        return [LinesFile(name, config.column, parse_text_row) for name in names]
    if names and isinstance(builder.config, ParquetConfig):
        return [ParquetRows(name, config.column) for name in names]
    examples = builder.as_streaming_dataset(split=config.split)
    count = examples.num_shards
    if len(names) != count:
        names = [f"{config.path} part {index + 1}" for index in range(count)]
    return [LibraryFile(name, config.column, examples.shard(count, index)) for index, name in enumerate(names)]
