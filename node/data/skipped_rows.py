"""Faults of text sources: rows that are skipped, and errors that name their source.

A row is an example of a data set, a text file, or a window of token ids. Rows that cannot be used are counted by
reason, and named once for each file. In one pass over the text, one row in ROWS_PER_FAULT may be unusable, rounded up;
above that share the pass raises TooManyFaultsError, from MIN_JUDGED_ROWS rows on and again at the end of the pass.
"""

import collections
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from node.monitoring.logs import sanitize
from node.units import format_plural
from protocol.errors import DataError, MissingFileError, MurmurError, describe_error
from protocol.manifest.sections import SourceSection

SkipReason = Literal[
    "null",
    "missing column",
    "not text",
    "malformed row",
    "bad UTF-8",
    "too long",
    "unreadable file",
    "id above vocabulary",
]
ROWS_PER_FAULT = 20
MIN_JUDGED_ROWS = 100
MAX_NAMED_FILES = 100
MAX_FAULT_CHARACTERS = 200


class TooManyFaultsError(DataError):
    """A pass has too many unusable rows."""


class Fault(NamedTuple):
    """Why a row cannot be used: a fixed word for the counter and a text for people."""

    reason: SkipReason
    text: str


@dataclass(frozen=True)
class SkipReport:
    """Rows skipped since the last report, by reason, and a line for each file that had none before."""

    counts: Mapping[SkipReason, int]
    lines: tuple[str, ...]


@dataclass
class SkipLog:
    """The rows that this process skipped; all passes over one source share it."""

    _unreported: collections.Counter[SkipReason] = field(default_factory=collections.Counter)
    _lines: list[str] = field(default_factory=list)
    _named_files: set[str] = field(default_factory=set)

    def record(self, file: str, place: str, fault: Fault) -> None:
        """Count an unusable row, and name it if it is the first of its file."""
        self._unreported[fault.reason] += 1
        if file not in self._named_files and len(self._named_files) < MAX_NAMED_FILES:
            self._named_files.add(file)
            self._lines.append(f"skipped {_describe(file, place, fault)}")

    def take_report(self) -> SkipReport | None:
        """Return the skipped rows that were not reported yet, if there are any."""
        if not self._unreported:
            return None
        report = SkipReport(dict(self._unreported), tuple(self._lines))
        self._unreported.clear()
        self._lines.clear()
        return report


class RowPass:
    """One pass over a source, which judges the share of unusable rows.

    A pass that is read to its end in any case is judged only there (`judged_from` is None).
    """

    def __init__(self, log: SkipLog, judged_from: int | None = MIN_JUDGED_ROWS) -> None:
        self._log = log
        self._judged_from = judged_from
        self._first = ""  # description of the first unusable row
        self.rows = 0
        self.skipped = 0

    def keep(self, rows: int = 1) -> None:
        """Count usable rows."""
        self.rows += rows

    def skip(self, file: str, place: str, fault: Fault) -> None:
        """Count an unusable row. Raises TooManyFaultsError."""
        self.rows += 1
        self.skipped += 1
        self._first = self._first or _describe(file, place, fault)
        self._log.record(file, place, fault)
        if self._judged_from is not None and self.rows >= self._judged_from:
            self._judge()

    def finish(self) -> None:
        """Judge a whole pass at its end. Raises TooManyFaultsError if no row or too few rows are usable."""
        if self.skipped and self.skipped == self.rows:
            raise TooManyFaultsError(self._first)
        self._judge()

    def _judge(self) -> None:
        if self.skipped > -(-self.rows // ROWS_PER_FAULT):
            count = format_plural(self.rows, "row")
            raise TooManyFaultsError(
                f"{self.skipped} of {count} of the text cannot be used, above {1 / ROWS_PER_FAULT:.0%}; "
                f"the first: {self._first}"
            )


def _describe(file: str, place: str, fault: Fault) -> str:
    where = f"{file} {place}".strip()
    return sanitize(f"{where}: {fault.text}")[:MAX_FAULT_CHARACTERS]


@contextmanager
def name_source_faults(source: SourceSection) -> Iterator[None]:
    """Raise any error in the context as a MurmurError of one line that names the source, if it has a name."""
    try:
        yield
    except (DataError, MissingFileError) as error:
        prefix = f"source {source.name}: "
        if not source.name or str(error).startswith(prefix):
            raise
        raise type(error)(prefix + str(error)) from error
    except (MurmurError, MemoryError):
        raise
    except Exception as error:  # libraries of formats and tokenizers raise errors of many kinds
        reason = describe_error(error).splitlines()[0]
        table = source.key
        place = f"{table}.source = {source.source!r}" + (f", {table}.path = {source.path!r}" if source.path else "")
        raise DataError(f"cannot read the text ({place}): {type(error).__name__}: {reason}; check the files") from error
