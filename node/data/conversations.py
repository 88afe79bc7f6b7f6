"""Conversations of a run: JSON lines and Parquet files here, or a Hugging Face data set.

The hash of its messages decides whether a conversation is held out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from node.data.chat import ChatEncoder
from node.data.corpus import PackedText, SourceText, is_held_out
from node.data.huggingface import ParquetRows, Row, open_examples, open_huggingface, parse_json_row
from node.data.skipped_rows import Fault, RowPass, SkipLog
from node.data.text_files import MAX_TEXT_BYTES, find_text_files
from protocol.errors import DataError
from protocol.manifest.sections import SourceSection

MESSAGES_COLUMN: Final = "messages"
TEXT_COLUMN: Final = "text"  # of sources that name none
PARQUET: Final = ".parquet"


def open_conversations(
    source: SourceSection, base: Path, encoder: ChatEncoder, validation_share: float, log: SkipLog
) -> SourceText:
    """Open a source of conversations. Raises DataError or MissingFileError."""
    if source.source == "hf":
        return open_huggingface(with_column(source), base, encoder, validation_share, log)
    found = list(read_conversations(source, base, encoder, validation_share, log))
    held_out = [is_held_out(text.encode(), validation_share) for text in found]
    if not any(held_out) and len(found) > 1:
        held_out[0] = True
    encoded = [np.concatenate([encoder.encode(text), encoder.end]) for text in found]
    training, validation = (
        PackedText([tokens for tokens, is_out in zip(encoded, held_out, strict=True) if is_out == wanted], encoder.end)
        for wanted in (False, True)
    )
    if not len(training) or not len(validation):
        raise DataError(f"{source.path!r} has too few conversations; give at least two, better hundreds")
    return SourceText(training, validation, encoder.size, source)


def read_conversations(
    source: SourceSection, base: Path, encoder: ChatEncoder, validation_share: float, log: SkipLog
) -> Iterator[str]:
    """Yield the usable conversations of a source in its order, each as one line of JSON."""
    source = with_column(source)
    if source.source == "hf":
        yield from open_examples(source, base, encoder, validation_share, log).texts()
        return
    row_pass, (files, _) = RowPass(log, judged_from=None), find_text_files(source.path, base)
    if (total := sum(path.stat().st_size for path in files)) > MAX_TEXT_BYTES:
        raise DataError(f"{total >> 20} MiB of conversations; above {MAX_TEXT_BYTES >> 20} MiB use data.source = 'hf'")
    for path in files:
        for row in _rows(path, source.column, encoder):
            if isinstance(row.content, Fault):
                row_pass.skip(str(path), row.name, row.content)
            else:
                row_pass.keep()
                yield row.content
    row_pass.finish()


def with_column(source: SourceSection) -> SourceSection:
    """Return the source with the column of its conversations: `messages`, unless it names another one than `text`."""
    named = source.column if source.column != TEXT_COLUMN else MESSAGES_COLUMN
    return source.model_copy(update={"column": named})


def _rows(path: Path, column: str, encoder: ChatEncoder) -> Iterator[Row]:
    if path.suffix == PARQUET:
        yield from ParquetRows(str(path), column, encoder.find).rows(0)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Row(number, f"row {number}", parse_json_row(line, column, encoder.find))
