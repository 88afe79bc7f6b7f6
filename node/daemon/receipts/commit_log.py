"""The signed commits of a run in a file that only its owner writes: appended round by round, repaired at each start.

A writer that was killed may leave a partial record at the end, which the next start cuts off; the commits are fetched
again. If bytes inside the file have changed, the file is kept as `commits.log.damaged`, and the log continues with the
records before the damage. When the swarm switches to another chain, the log drops the rounds that only the old one has.

A node that trains records the commits that it follows (`record_chain`), so that its owner can make a receipt without a
host.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from node.daemon.receipts.commit_file import (
    COMMIT_FILE_NAME,
    CommitFileHeader,
    CutRecordError,
    DamagedRecordError,
    Start,
    encode_commit,
    encode_start,
    read_header,
    read_records,
)
from node.daemon.receipts.ledger import RunLedger, commit_reader
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead, ChainLog, extend_head, genesis_head
from protocol.errors import ReceiptError, StorageError
from protocol.manifest.run import Manifest
from protocol.pipeline.stage import stage_of
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

RECORD_SECONDS = 2.0  # the chain keeps the last 64 commits


class CommitLog:
    """The commits on disk, and their sums in `ledger`. Methods raise StorageError if the disk refuses."""

    def __init__(self, path: Path, header: CommitFileHeader) -> None:
        self.path = path
        self.ledger = RunLedger(header)
        self._header = header

    @classmethod
    def open(cls, path: Path, header: CommitFileHeader) -> "CommitLog":
        """Open the log of a run, or begin one. Raises ReceiptError if the file is of another run."""
        self = cls(path, header)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch()
            if path.stat().st_size < len(header.to_line()):  # new, or its writer was killed in the first line
                path.write_bytes(header.to_line())
            self._load()
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; choose another --dir") from error
        return self

    @property
    def head(self) -> ChainHead:
        """Return the head of the chain after the last commit of the log."""
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
        self.ledger = RunLedger(self._header)
        open_commit = commit_reader(self._header)
        with self.path.open("rb") as file:
            if read_header(file, self.path) != self._header:
                raise ReceiptError(f"{self.path} holds the commits of another run; choose another --dir")
            for record in read_records(file, self._header.rule):
                self.ledger.take(record.content, open_commit)
                yield record.end, self.ledger.head

    def _load(self) -> None:
        """Read the file, and truncate it after the last readable record."""
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


def commit_file_header(manifest: Manifest) -> CommitFileHeader:
    """Return the first line of the file of a run's commits."""
    from node.model import shapes_of  # loads torch, which `murmur verify` does without

    shapes, organiser = shapes_of(manifest).hash(), manifest.run.organiser_key
    whole_run = "" if manifest.run_id == manifest.whole_run_id else manifest.whole_run_id
    return CommitFileHeader(manifest.run_id, manifest.method.recipe, shapes, organiser, manifest.admission, whole_run)


def receipt_name(manifest: Manifest) -> str:
    """Return the name of a run in its receipts, with the stage of a pipeline."""
    stage = stage_of(manifest)
    return manifest.run.name if stage is None else f"{manifest.run.name}, stage {stage}"


@asynccontextmanager
async def record_chain(chain: Chain, manifest: Manifest, folder: Path) -> AsyncIterator[None]:
    """Write the commits of a run's chain to a file in `folder` while the context is open."""
    log = CommitLog.open(folder / COMMIT_FILE_NAME, commit_file_header(manifest))
    task = asyncio.create_task(_record_forever(log, chain), name="chain recorder")
    try:
        yield
    finally:
        failed = task.done()
        await cancel_and_wait((task,))
        if not failed:
            _record(log, chain)


async def _record_forever(log: CommitLog, chain: Chain) -> None:
    """Record until cancelled, or until the disk refuses; then training continues without a record."""
    while _record(log, chain):
        await asyncio.sleep(RECORD_SECONDS)


def _record(log: CommitLog, chain: Chain) -> bool:
    try:
        append_new_commits(log, chain)
    except StorageError as error:
        logger.warning("the commits of the run are no longer recorded for receipts: %s", error)
        return False
    return True


def append_new_commits(log: CommitLog, chain: Chain) -> None:
    """Extend the log to the head of the chain, with the commits that the chain still holds."""
    if log.head == chain.head:
        return
    found = chain.log_since(log.head.round)
    if found is None or not found.commits or found.commits[0].body.base != log.head.digest:  # another chain, or a gap
        found = chain.log
    if found.commits:  # without any, the state was downloaded, and no commit has followed it yet
        first, tokens = found.commits[0].body, found.commits[0].certificate.basis.tokens
        log.extend(ChainHead(first.round, first.base, tokens), found)
