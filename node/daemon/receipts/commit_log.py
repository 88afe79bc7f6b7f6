"""The signed commits of a run in a file that only its owner writes: appended round by round, repaired at each start.

A writer that was killed may leave a partial record at the end, which the next start cuts off; the commits are fetched
again. If bytes inside the file have changed, the file is kept as `commits.log.damaged`, and the log goes on with the
records before the damage. When the swarm switches to another chain, the log drops the rounds that only the old one has.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from node.daemon.receipts.commit_file import (
    CommitFileHeader,
    CutRecordError,
    DamagedRecordError,
    Start,
    encode_commit,
    encode_start,
    read_header,
    read_records,
)
from node.daemon.receipts.ledger import Ledger, commit_reader
from protocol.consensus.history.certified import CertifiedCommit, ChainLog
from protocol.consensus.history.chain import ChainHead, extend_head, genesis_head
from protocol.errors import ReceiptError, StorageError

logger = logging.getLogger(__name__)


class CommitLog:
    """The commits on disk and their account, `ledger`. Methods raise StorageError if the disk refuses."""

    def __init__(self, path: Path, header: CommitFileHeader) -> None:
        self.path = path
        self.ledger = Ledger(header)
        self._header = header

    @classmethod
    def open(cls, path: Path, header: CommitFileHeader) -> "CommitLog":
        """Open the log of a run, or begin one. Raises ReceiptError if the file is of another run."""
        self = cls(path, header)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch()
            if path.stat().st_size < len(header.to_line()):  # it is new, or its writer was killed in the first line
                path.write_bytes(header.to_line())
            self._load()
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; choose another --dir") from error
        return self

    @property
    def head(self) -> ChainHead:
        """Return the head of the chain up to which the log reaches."""
        return self.ledger.head

    def extend(self, start: ChainHead, log: ChainLog) -> None:
        """Append the commits that follow `start`, and drop the rounds that their chain does not have."""
        try:
            known = 0 if start == self.head else self._rewind(start, log.commits)
            if not known and start != self.head:
                begun = Start(start, log.electorate)
                self._write(encode_start(begun))
                self.ledger.start(begun)
            for entry in log.commits[known:]:
                self._write(encode_commit(entry))
                self.ledger.add(entry)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}; free some space") from error

    def _write(self, records: bytes) -> None:
        with self.path.open("ab", buffering=0) as file:
            if file.write(records) != len(records):  # the next start cuts the partial record off
                raise StorageError(f"cannot write {self.path}: no space left; free some space")

    def _rewind(self, start: ChainHead, commits: Sequence[CertifiedCommit]) -> int:
        """Drop the rounds that the chain of `commits` does not have; returns how many of the commits the log keeps."""
        heads = [start]
        for commit in commits:
            heads.append(extend_head(heads[-1], commit.body))
        index_of = {head.digest: index for index, head in enumerate(heads)}
        common, end = -1, len(self._header.to_line())
        if genesis_head(self._header.run_id) == start:
            common = 0
        elif 0 < start.round - self.head.round <= start.tokens - self.head.tokens:
            return 0  # after a gap
        for position, head in self._scan():
            if head.digest in index_of:
                common, end = index_of[head.digest], position
        if common < len(heads) - 1 or self.head != heads[-1]:
            os.truncate(self.path, end)
            self._load()
        return max(0, common)

    def _scan(self) -> Iterator[tuple[int, ChainHead]]:
        """Yield the head after each record of the file, and its position, and fill a new ledger on the way."""
        self.ledger = Ledger(self._header)
        open_commit = commit_reader(self._header)
        with self.path.open("rb") as file:
            if read_header(file, self.path) != self._header:
                raise ReceiptError(f"{self.path} holds the commits of another run; choose another --dir")
            for record in read_records(file, self._header.rule):
                self.ledger.take(record.content, open_commit)
                yield record.end, self.ledger.head

    def _load(self) -> None:
        """Read the file, and cut it off where the records end that can be read."""
        end = len(self._header.to_line())
        try:
            for position, _ in self._scan():
                end = position
        except DamagedRecordError as error:
            damaged = self.path.with_name(f"{self.path.name}.damaged")
            shutil.copyfile(self.path, damaged)
            logger.warning("%s: %s; the whole file is kept as %s", self.path, error, damaged.name)
            os.truncate(self.path, end)
        except CutRecordError as error:
            logger.info("%s: %s; it is cut off there", self.path, error)
            os.truncate(self.path, end)
