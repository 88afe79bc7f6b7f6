"""Check the text of a run in a few seconds, before a peer is announced.

The check opens the text as the trainer does, counts documents and tokens for READ_SECONDS, and decodes a sample. A data
set of the hub is read in a child process (`python -m node.data.check`), because the library needs much memory,
and the network may not answer.
"""

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from node.data.batches import BatchReader, validation_sets
from node.data.chat import ChatEncoder, open_encoder
from node.data.conversations import read_conversations
from node.data.corpus import (
    UNCOUNTED,
    Corpus,
    PackedText,
    Shard,
    TokenArray,
    count_held_out,
    is_held_out,
    require_held_out_tokens,
    require_training_tokens,
    require_vocabulary,
)
from node.data.huggingface import open_examples
from node.data.skipped_rows import RowPass, SkipLog, name_source_faults
from node.data.source import open_source, require_document_end, require_one_vocabulary
from node.data.text_files import find_files, name_of, read_files
from node.data.tokenizer import TextTokenizer, open_tokenizer
from node.monitoring.logs import sanitize
from node.own_loops import NO_DATA
from node.processes.process import python_environment, rare_garbage_collection
from node.units import format_count, format_plural
from protocol.errors import DataError, MurmurError, error_with_code
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection, SourceSection

logger = logging.getLogger(__name__)

READ_SECONDS = 3.0
CHILD_SECONDS = 60.0
PIECE_CHARACTERS = 2**20
SAMPLE_TOKENS = 64
SAMPLE_CHARACTERS = 60
DRAWN_WINDOWS = 64  # of shards, to find damaged ids
VALIDATION_TOKENS = 65_536


class TextReport(BaseModel):
    """The findings of the check in a usable source of text; `name` is that of the source, if it has one."""

    name: str = ""
    documents: int | None = None  # None: the source does not know them
    tokens: int = 0
    vocabulary: int = 0  # token ids; 0: not read
    is_complete: bool = True  # False: there is more than was counted
    sample: str = ""
    skipped_rows: int = 0
    skipped: tuple[str, ...] = ()  # a line for each file with rows that cannot be used
    unchecked: str = ""  # why the text was not read

    def describe(self) -> str:
        """Return the line for people."""
        return f"{self.name}: {self._describe_text()}" if self.name else self._describe_text()

    def _describe_text(self) -> str:
        if self.unchecked:
            return f"not checked: {self.unchecked}"
        at_least = "" if self.is_complete else "at least "
        noun = "document" if self.documents == 1 else "documents"
        documents = "" if self.documents is None else f"{at_least}{self.documents:,} {noun}, "
        skipped = f", skipped {format_plural(self.skipped_rows, 'row')}" if self.skipped_rows else ""
        return f'{documents}{at_least}{format_count(self.tokens)} tokens{skipped}; sample: "{self.sample}"'


def check_text(manifest: Manifest, base: Path) -> list[TextReport]:
    """Open and read each source of text of a run; `base` is the folder of its paths.

    Raises:
        DataError, MissingFileError: The trainer could not use this text.
    """
    if manifest.data.source == "own":
        raise DataError(NO_DATA)
    require_document_end(manifest.model, manifest.data, base)
    reports = [
        _check_in_child(manifest, number, base) if source.source == "hf" else read_text(manifest, source, base)
        for number, source in enumerate(manifest.data.mixture)
    ]
    require_one_vocabulary({report.name: report.vocabulary for report in reports if report.vocabulary})
    return reports


def check_and_log_text(manifest: Manifest, base: Path) -> None:
    """Check the text, and log the result. Raises as `check_text`.

    The trainer names the rows that cannot be used.
    """
    for report in check_text(manifest, base):
        logger.info("data: %s", report.describe())


def is_on_hub(manifest: Manifest, base: Path) -> bool:
    """Return whether text is downloaded while the run trains."""
    return any(source.source == "hf" and not (base / source.path).exists() for source in manifest.data.mixture)


def read_text(manifest: Manifest, source: SourceSection, base: Path) -> TextReport:
    """Check a source in this process."""
    with name_source_faults(source):
        match source.source:
            case "tokens":
                report = _read_shards(manifest, source, base)
            case "questions":
                report = _read_questions(manifest, source, base)
            case _:
                report = _read_documents(manifest, source, base)
        return report.model_copy(update={"name": source.name})


def _read_questions(manifest: Manifest, source: SourceSection, base: Path) -> TextReport:
    """Check that the right answers to the questions of a task, which are made here, fit the model."""
    encoder = open_encoder(manifest.data, base)
    tokenizer = encoder.tokenizer if isinstance(encoder, ChatEncoder) else encoder
    require_vocabulary(tokenizer.size, manifest.model.vocabulary)
    text = open_source(source, manifest.data, base, SkipLog(), manifest.method.modules)
    assert isinstance(text.training, PackedText)
    windows = text.training.spread(manifest.model.context, SAMPLE_TOKENS)
    return TextReport(
        tokens=len(text.training) + len(text.validation),
        vocabulary=tokenizer.size,
        sample=_decode_sample(tokenizer, windows[0].tolist()).partition("\ufffd")[0].rstrip(),  # before the padding
    )


def _read_shards(manifest: Manifest, source: SourceSection, base: Path) -> TextReport:
    log, context = SkipLog(), manifest.model.context
    text = open_source(source, manifest.data, base, log, manifest.method.modules)
    assert isinstance(text.training, TokenArray)
    corpus = Corpus((text,), log)
    corpus.require_vocabulary(manifest.model.vocabulary)
    validation_sets(corpus, context, VALIDATION_TOKENS)
    windows = BatchReader(corpus, context, manifest.run.seed, "check").next_batch(DRAWN_WINDOWS)
    tokenizer, report = open_tokenizer(manifest.data.tokenizer, base), log.take_report()
    return TextReport(
        tokens=len(text.training) + len(text.validation),
        vocabulary=text.vocabulary_size,
        sample=_decode_sample(tokenizer, windows[0].tolist()),
        skipped_rows=sum(report.counts.values()) if report else 0,
        skipped=report.lines if report else (),
    )


class _CheckedPart(NamedTuple):
    """A part of a document, so that a long one does not take long either."""

    tokens: Shard
    name: bytes  # of the document; decides whether it is held out
    is_first: bool


class _TokenCount:
    """Documents and tokens read so far."""

    def __init__(self, validation_share: float) -> None:
        self._validation_share = validation_share
        self._first_tokens = 0
        self._held_out_documents = 0
        self._held_out_tokens = 0
        self.documents = 0
        self.tokens = 0
        self.sample: Shard | None = None

    def add(self, piece: _CheckedPart) -> None:
        """Count a piece of a document."""
        length = len(piece.tokens)
        self.documents += piece.is_first
        self.tokens += length
        if self.documents == 1:
            self._first_tokens += length
        if is_held_out(piece.name, self._validation_share):
            self._held_out_documents += piece.is_first
            self._held_out_tokens += length
        if self.sample is None and length:
            self.sample = piece.tokens[:SAMPLE_TOKENS]

    def held_out_tokens(self, are_files: bool) -> int:
        """Return the number of tokens that are held out; of files, some always are and some are not."""
        if are_files and self.documents == 1:
            return count_held_out(self.tokens, self._validation_share)
        if are_files and self._held_out_documents in (0, self.documents):
            return self._first_tokens
        return self._held_out_tokens


def _read_documents(
    manifest: Manifest, source: SourceSection, base: Path, clock: Callable[[], float] = time.monotonic
) -> TextReport:
    encoder, log = open_encoder(manifest.data, base), SkipLog()
    tokenizer = encoder.tokenizer if isinstance(encoder, ChatEncoder) else encoder
    count = _TokenCount(manifest.data.validation_share)
    require_vocabulary(tokenizer.size, manifest.model.vocabulary)
    deadline, is_complete = math.inf, True
    for piece in _pieces(manifest.data, source, base, encoder, log):
        count.add(piece)
        if count.tokens and deadline == math.inf:
            deadline = clock() + READ_SECONDS  # opening a data set takes time of its own
        elif clock() > deadline:
            is_complete = False
            break
    if is_complete:
        _require_windows(manifest, source, count)
    if manifest.data.chat is not None and is_complete:
        open_source(source, manifest.data, base, SkipLog(), manifest.method.modules).training.windows(
            manifest.model.context, 0, 0
        )
    report = log.take_report()
    return TextReport(
        documents=count.documents,
        tokens=count.tokens,
        vocabulary=tokenizer.size,
        is_complete=is_complete,
        sample="" if count.sample is None else _decode_sample(tokenizer, count.sample.tolist()),
        skipped_rows=sum(report.counts.values()) if report else 0,
        skipped=report.lines if report else (),
    )


def _pieces(
    data: DataSection, source: SourceSection, base: Path, tokenizer: TextTokenizer | ChatEncoder, log: SkipLog
) -> Iterator[_CheckedPart]:
    if isinstance(tokenizer, ChatEncoder):
        for text in read_conversations(source, base, tokenizer, data.validation_share, log):
            yield _CheckedPart(tokenizer.encode(text), text.encode(), is_first=True)
            yield _CheckedPart(tokenizer.end, text.encode(), is_first=False)
        return
    for name, text in _documents(data, source, base, tokenizer, log):
        for start in range(0, max(1, len(text)), PIECE_CHARACTERS):
            yield _CheckedPart(tokenizer.encode(text[start : start + PIECE_CHARACTERS]), name, is_first=start == 0)
        yield _CheckedPart(tokenizer.end, name, is_first=False)


def _documents(
    data: DataSection, source: SourceSection, base: Path, tokenizer: TextTokenizer, log: SkipLog
) -> Iterator[tuple[bytes, str]]:
    if source.source == "hf":
        examples = open_examples(source, base, tokenizer, data.validation_share, log)
        yield from ((text.encode(), text) for text in examples.texts())
        return
    files, root = find_files(source, base)
    yield from ((name_of(path, root), text) for path, text in read_files(files, RowPass(log, judged_from=None)))


def _require_windows(manifest: Manifest, source: SourceSection, count: _TokenCount) -> None:
    if not count.tokens:
        raise DataError(f"the text {source.path!r} is empty; give files with text")
    if manifest.data.chat is not None:
        return  # they are packed, so a few fill a window
    held_out = count.held_out_tokens(are_files=source.source != "hf")
    require_training_tokens(count.tokens - held_out, manifest.model.context)
    require_held_out_tokens(held_out, manifest.model.context)


def _decode_sample(tokenizer: TextTokenizer, tokens: Sequence[int]) -> str:
    """Return the beginning of the tokens' text as one line that a terminal may show."""
    text = "".join(tokenizer.decode(token % UNCOUNTED for token in tokens[:SAMPLE_TOKENS]))
    line = sanitize(" ".join(text.split()))
    return line if len(line) <= SAMPLE_CHARACTERS else line[: SAMPLE_CHARACTERS - 3] + "..."


class _ChildAnswer(BaseModel):
    report: TextReport | None = None
    error: str = ""
    exit_code: int = 0


def _check_in_child(manifest: Manifest, number: int, base: Path) -> TextReport:
    request = json.dumps({"manifest": manifest.to_toml(), "number": number, "base": str(base)})
    source = manifest.data.mixture[number]
    try:
        child = subprocess.run(
            [sys.executable, "-m", "node.data.check"],
            input=request.encode(),
            capture_output=True,
            timeout=CHILD_SECONDS,
            env=python_environment(),
            check=False,
        )
        answer = _ChildAnswer.model_validate_json(child.stdout)
    except subprocess.TimeoutExpired:
        return TextReport(name=source.name, unchecked=f"the data set did not answer within {CHILD_SECONDS:.0f} s")
    except ValidationError as error:
        last_line = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DataError(f"the data set {source.path!r} cannot be read: {last_line}; check it") from error
    if answer.report is None:
        raise error_with_code(answer.exit_code, answer.error)
    return answer.report


def main() -> None:
    """Answer one request on standard input."""
    request = json.load(sys.stdin)
    manifest = parse_manifest(request["manifest"].encode(), "the manifest")
    source = manifest.data.mixture[request["number"]]
    try:
        answer = _ChildAnswer(report=read_text(manifest, source, Path(request["base"])))
    except MurmurError as error:
        answer = _ChildAnswer(error=str(error), exit_code=error.exit_code)
    sys.stdout.write(answer.model_dump_json())


if __name__ == "__main__":
    with rare_garbage_collection():  # the library that reads the hub is large
        main()
