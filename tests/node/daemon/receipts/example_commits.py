"""Chains of signed commits, for tests of receipts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from node.daemon.receipts.commit_file import (
    COMMIT_FILE_NAME,
    CommitFileHeader,
    Start,
    encode_commit,
    read_header,
    read_records,
)
from node.daemon.receipts.commit_log import CommitLog
from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead, ChainLog, extend_head, genesis_head
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import Identity
from protocol.rollout_credits import Credits
from tests.node.small_run import PEERS, RUN_ID, SHAPES, certified, stated

HEADER = CommitFileHeader(RUN_ID, "diloco", SHAPES.hash(), PEERS[5].peer_id)
HOST, MARY, TOM, ZOE = PEERS[0], PEERS[1], PEERS[2], PEERS[3]
GENESIS = genesis_head(RUN_ID)
Given = Mapping[int, tuple[int, int]]  # number of the peer: tokens, age


def signed_commit(
    head: ChainHead,
    given: Given,
    left_out: Sequence[Identity] = (),
    run_id: str = RUN_ID,
    word: str = "",
    credited: Credits = (),
) -> SignedMessage[Commit]:
    """Return the commit of the round after `head`, signed by the first peer."""
    contributions = []
    for number, (tokens, age) in given.items():
        parts = (Blob.of(f"{word}{head.round} {number}".encode()),)
        body = Contribution(
            head.round, head.digest, "diloco", SHAPES.hash(), tokens, 5, 3.0, parts, age, credits=credited
        )
        contributions.append(stated(PEERS[number], body, run_id))
    ordered = tuple(sorted(contributions, key=lambda message: message.sender))
    silent = tuple(sorted(peer.peer_id for peer in left_out))
    return stated(PEERS[0], Commit(head.round, 0, head.digest, ordered, (), silent), run_id)


def chain(
    rounds: Sequence[Given], start: Chain | None = None, word: str = "", credited: Credits = ()
) -> list[CertifiedCommit]:
    """Return consecutive commits; from the second on, the peers that gave nothing are left out, as in groups.

    Without `start` they begin at the genesis. Each contribution credits the same makers.
    """
    grown = Chain.from_genesis(RUN_ID) if start is None else Chain(start.head, start.log)
    for given in rounds:
        silent = [PEERS[number] for number in (1, 2, 3) if number not in given] if grown.round else []
        grown.append(certified(grown, signed_commit(grown.head, given, silent, word=word, credited=credited)))
    return list(grown.commits_since(grown.round - len(rounds)) or ())


def chain_to(commits: Sequence[CertifiedCommit], start: Chain | None = None) -> Chain:
    """Return the chain after these commits."""
    grown = Chain.from_genesis(RUN_ID) if start is None else Chain(start.head, start.log)
    for commit in commits:
        grown.append(commit)
    return grown


def log_of(commits: Sequence[CertifiedCommit], start: Chain | None = None) -> ChainLog:
    """Return these commits with the electorate before them."""
    return ChainLog((start or Chain.from_genesis(RUN_ID)).electorate, tuple(commits))


def extend(log: CommitLog, commits: Sequence[CertifiedCommit], after: Sequence[CertifiedCommit] = ()) -> None:
    """Append commits that follow those of `after`, which begin at the genesis."""
    start = chain_to(after)
    log.extend(start.head, log_of(commits, start))


def head_after(commits: Sequence[CertifiedCommit], start: ChainHead = GENESIS) -> ChainHead:
    head = start
    for commit in commits:
        head = extend_head(head, commit.body)
    return head


THREE_PEERS: list[Given] = [
    {1: (100, 0), 2: (90, 0), 3: (70, 0)},
    {1: (110, 0), 2: (90, 0)},  # the third one misses its round
    {1: (101, 0), 3: (75, 1)},  # and is counted one round later
    {2: (3, 0)},
    {1: (100, 0), 2: (91, 1), 3: (70, 0)},
]


def log_in(folder: Path) -> CommitLog:
    return CommitLog.open(folder / COMMIT_FILE_NAME, HEADER)


def read_messages(path: Path) -> Iterator[Start | wire.ChainLog]:
    with path.open("rb") as file:
        read_header(file, path)
        yield from (record.content for record in read_records(file, HEADER.rule))


def write_messages(path: Path, messages: Sequence[CertifiedCommit]) -> None:
    """Write a file of commits as it is, without any check."""
    path.write_bytes(HEADER.to_line() + b"".join(map(encode_commit, messages)))
