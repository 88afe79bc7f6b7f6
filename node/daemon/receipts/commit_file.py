"""Read and write the file format of the signed commits of a run.

The file begins with one line, `murmur commits 2 RUN-ID CODEC SHAPES ORGANISER ADMISSION`, the last of which is the
table [admission] of the manifest as JSON, followed by records:

    length of the content (4 bytes, big endian), CRC-32 of kind and content (4 bytes), kind (1 byte), content

    S    a start after a gap, which is a stretch of rounds that the writer could not fetch: the chain head that the
         next commits continue, and the electorate there, as JSON. Without one, the commits begin at the genesis
    C    a commit with its certificate: the message as its leader signed it, with the signed contributions inside, and
         the acknowledgements that decided it, as a `ChainLog` of one commit

Everything read here may come from anybody: sizes are checked before bytes are read.
"""

import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.consensus.chain import CertifiedCommit, ChainHead
from protocol.consensus.messages.contributions import MAX_MESSAGE_BYTES, MAX_PARTS, MAX_TOKENS, ContributionLimits
from protocol.consensus.messages.kinds import MAX_VOTES
from protocol.electorate import OPEN, Electorate
from protocol.errors import CheckpointError, MissingFileError, PeerFault, ReceiptError
from protocol.identity import PeerId
from protocol.manifest.sections import AdmissionSection

COMMIT_FILE_NAME = "commits.log"
START, COMMIT = b"S", b"C"
RECORD_HEAD = struct.Struct(">IIc")
MAX_ENVELOPE_BYTES = 1024  # of a signed message, beyond its body
MAX_CERTIFICATE_BYTES = MAX_VOTES * 128
MAX_RECORD_BYTES = MAX_MESSAGE_BYTES + MAX_ENVELOPE_BYTES + MAX_CERTIFICATE_BYTES
MAX_HEADER_BYTES = 256 * 1024
MAX_BLOB_BYTES = 1 << 40  # no blobs are fetched, only their sizes are shown
NO_ORGANISER = "-"
HEADER = re.compile(
    rb"murmur commits 2 ([0-9a-f]{64})(?: of ([0-9a-f]{64}))? ([\w-]{1,64}) ([0-9a-f]{64}) "
    rb"(-|[1-9A-HJ-NP-Za-km-z]{52}) ({[^\s]*})\n"
)


@dataclass(frozen=True)
class CommitFileHeader:
    """The run whose commits a file holds, and the values that all contributions to it share.

    `organiser`: the key that may steer the run; empty if there is none. `rule`: who votes. `whole_run`: the run of
    which this one is a stage; empty if it is not one.
    """

    run_id: str
    codec: str
    shapes: bytes
    organiser: PeerId = ""
    rule: AdmissionSection = OPEN
    whole_run: str = ""

    def to_line(self) -> bytes:
        organiser, rule = self.organiser or NO_ORGANISER, self.rule.model_dump_json()
        run = f"{self.run_id} of {self.whole_run}" if self.whole_run else self.run_id
        return f"murmur commits 2 {run} {self.codec} {self.shapes.hex()} {organiser} {rule}\n".encode()

    def limits(self) -> ContributionLimits:
        """Return wide limits: the peers already checked their commits against the limits of the run."""
        return ContributionLimits(
            *(self.codec, self.shapes, MAX_PARTS, MAX_TOKENS, MAX_BLOB_BYTES, self.organiser, self.whole_run),
            microbatches=None,
            credited_groups=None,
        )


@dataclass(frozen=True)
class Start:
    """The place of the next commits on the chain: the head that they continue, and the electorate there."""

    head: ChainHead
    electorate: Electorate


@dataclass(frozen=True)
class Record:
    """One record, a start or a commit with its certificate; `end` is the position in the file after it."""

    content: Start | wire.ChainLog
    end: int


class CutRecordError(Exception):
    """The file ends inside a record that begins at `position`, as it does after its writer was killed."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the file ends inside the record at byte {position}")
        self.position = position


class DamagedRecordError(CutRecordError):
    """The record at `position` is complete, but its bytes have changed."""


def encode_record(kind: bytes, content: bytes) -> bytes:
    return RECORD_HEAD.pack(len(content), zlib.crc32(kind + content), kind) + content


def encode_start(start: Start) -> bytes:
    values = {"head": start.head.to_json(), "electorate": start.electorate.to_json()}
    return encode_record(START, json.dumps(values).encode())


def encode_commit(entry: CertifiedCommit) -> bytes:
    log = wire.ChainLog(commits=[entry.commit.signed], certificates=[entry.certificate.to_wire()])
    return encode_record(COMMIT, log.SerializeToString(deterministic=True))


def read_header(file: BinaryIO, path: Path) -> CommitFileHeader:
    """Read the first line. Raises ReceiptError if it is that of another kind of file."""
    match = HEADER.fullmatch(file.readline(MAX_HEADER_BYTES))
    if match is None:
        raise ReceiptError(f"{path} does not hold the commits of a run; name the {COMMIT_FILE_NAME} of its host")
    try:
        run_id, whole_run, codec, shapes, organiser, rule = (field.decode() for field in match.groups(b""))
        admission = AdmissionSection.model_validate_json(rule)
    except ValueError as error:  # as pydantic's ValidationError is
        raise ReceiptError(f"{path} does not say who votes in its run; get the file again") from error
    key = organiser.replace(NO_ORGANISER, "")
    return CommitFileHeader(run_id, codec, bytes.fromhex(shapes), key, admission, whole_run)


def read_records(file: BinaryIO, rule: AdmissionSection) -> Iterator[Record]:
    """Yield the records from the current position on. Raises CutRecordError and DamagedRecordError."""
    position = file.tell()
    while head := file.read(RECORD_HEAD.size):
        if len(head) < RECORD_HEAD.size:
            raise CutRecordError(position)
        size, checksum, kind = RECORD_HEAD.unpack(head)
        if size > MAX_RECORD_BYTES:
            raise DamagedRecordError(position)
        content = file.read(size)
        if len(content) < size:
            raise CutRecordError(position)
        parsed = _parse_content(kind, content, rule) if zlib.crc32(kind + content) == checksum else None
        if parsed is None:
            raise DamagedRecordError(position)
        position += len(head) + size
        yield Record(parsed, position)


def _parse_content(kind: bytes, content: bytes, rule: AdmissionSection) -> Start | wire.ChainLog | None:
    """Return the content; `None` if it does not parse."""
    try:
        if kind == COMMIT:
            return wire.ChainLog.FromString(content)
        return _parse_start(json.loads(content), rule) if kind == START else None
    except (DecodeError, CheckpointError, PeerFault, ValueError, AttributeError, RecursionError):
        return None


def _parse_start(values: Mapping[str, Any], rule: AdmissionSection) -> Start:
    return Start(ChainHead.from_json(values.get("head") or {}), Electorate.from_json(values.get("electorate"), rule))


def open_commit_file(path: Path) -> BinaryIO:
    """Open the file for reading. Raises MissingFileError."""
    try:
        return path.open("rb")
    except OSError as error:
        text = f"cannot read {path}: {error.strerror}; name the {COMMIT_FILE_NAME} of a host"
        raise MissingFileError(text) from error
