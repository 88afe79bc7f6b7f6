"""`murmur verify` with hundreds of mutated files: it refuses them with one line, and never fails otherwise."""

import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from node.commands.receipts import verify_files
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.ledger import commit_reader, read_ledger
from node.daemon.receipts.receipt import issue_receipt
from protocol.errors import MurmurError
from tests.node.daemon.receipts.example_commits import (
    HEADER,
    HOST,
    MARY,
    THREE_PEERS,
    chain,
    extend,
    log_in,
)

SEED, FILES = 20261126, 300
COMMITS = chain(THREE_PEERS)
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**80, 10**400, 1e308, "", "\u00e9", "\ud83d", "x" * 5000, "\x1b[2J\n", [], {}, [[]] * 3,
)  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    log = log_in(tmp_path)
    extend(log, COMMITS[:2])
    extend(log, COMMITS[3:], COMMITS[:3])
    receipt = issue_receipt(read_ledger(log.path, commit_reader, {MARY.peer_id}), "small", MARY.peer_id, "mary", HOST)
    (tmp_path / "mary.json").write_bytes(receipt.to_json())
    return tmp_path / "mary.json", tmp_path / COMMIT_FILE_NAME


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Return the content with a bit flipped, a piece cut out, doubled, overwritten or moved."""
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice((1, 4, 32, 400)))
    piece = content[start:end]
    return draw.choice(
        (
            content[:start] + bytes([content[start] ^ 1 << draw.randrange(8)]) + content[start + 1 :],
            content[:start] + content[end:],
            content[:start] + piece + piece + content[end:],
            content[:start] + draw.randbytes(len(piece)) + content[end:],
            content[end:] + piece + content[:start],
            content[:start],
        )
    )


def verdict(receipt: Path, commits: Path) -> str:
    """Return "valid", or the line of the error; any other exception fails the test."""
    try:
        verify_files([receipt], commits)
    except MurmurError as error:
        return str(error)
    return "valid"


def test_mutated_commits_and_receipts_are_refused(files: tuple[Path, Path]) -> None:
    print(f"seed {SEED}")
    draw, (receipt, commits) = random.Random(SEED), files
    assert verdict(receipt, commits) == "valid"
    for path in (commits, receipt):
        whole = path.read_bytes()
        for number in range(FILES):
            changed = mutate(whole, draw)
            path.write_bytes(changed)
            if verdict(receipt, commits) == "valid":  # what follows the last round of the receipt does not matter
                assert changed.startswith(whole) if path == commits else json.loads(changed) == json.loads(whole), (
                    number
                )
        path.write_bytes(whole)


def test_odd_values_in_a_receipt_are_refused(files: tuple[Path, Path]) -> None:
    receipt, commits = files
    whole = json.loads(receipt.read_text())
    for name in whole:
        for value in ODD_VALUES:
            if value != whole[name]:
                receipt.write_text(json.dumps({**whole, name: value}))
                assert verdict(receipt, commits) != "valid", (name, value)


def test_odd_records_in_the_commits_are_refused(files: tuple[Path, Path]) -> None:
    receipt, commits = files
    odd = [b"", b"[" * 100_000, b"null", b"[]", b'{"round": 1e400}', b"\xff", b'{"round": ' + b"9" * 5000 + b"}"]
    for kind in (b"S", b"C", b"?"):
        for content in odd:
            record = struct.pack(">IIc", len(content), zlib.crc32(kind + content), kind) + content
            commits.write_bytes(HEADER.to_line() + record)
            assert verdict(receipt, commits) != "valid", (kind, content[:20])
    commits.write_bytes(HEADER.to_line() + struct.pack(">IIc", 2**32 - 1, 0, b"C"))
    assert "damaged" in verdict(receipt, commits)
