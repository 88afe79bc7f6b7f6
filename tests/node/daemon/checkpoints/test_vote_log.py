from dataclasses import replace
from pathlib import Path

import pytest

from node.daemon.checkpoints.vote_log import VoteLog
from protocol.consensus.chain import genesis_head
from protocol.consensus.events import Lock, VoteRecord
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.kinds import NO_BASIS, Acknowledgement, CommitCertificate
from protocol.errors import StorageError
from tests.node.small_run import PEERS, RUN_ID, contribution_of, payload, stated, store_in, terms_of

HEAD = genesis_head(RUN_ID)
MEMBERS = frozenset(identity.peer_id for identity in PEERS[:3])


def make_vote(folder: Path, view: int = 4) -> VoteRecord:
    blob = store_in(folder / "blobs").put(payload(1, 10))
    contribution = stated(PEERS[1], contribution_of(HEAD, [blob]))
    lock = stated(PEERS[0], Commit(HEAD.round, 1, HEAD.digest, (contribution,), ()))
    return VoteRecord(HEAD.round, HEAD.digest, view, lock, MEMBERS)


def test_saved_vote_is_loaded_after_a_restart(tmp_path: Path) -> None:
    vote_log = VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1))
    assert vote_log.load() is None
    for vote in (make_vote(tmp_path), VoteRecord(7, bytes(32), 0, None, MEMBERS)):
        vote_log.save(vote)
        assert VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1)).load() == vote


def test_confirmed_proposal_is_loaded_with_its_lock(tmp_path: Path) -> None:
    vote_log, vote = VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1)), make_vote(tmp_path)
    assert vote.lock is not None
    voters = sorted(PEERS[:3], key=lambda identity: identity.peer_id)
    said = [stated(identity, Acknowledgement.of(vote.lock, NO_BASIS)) for identity in voters]
    confirmed = replace(vote, confirmed=Lock(vote.lock, stated(PEERS[0], CommitCertificate.of(said))))
    vote_log.save(confirmed)
    assert vote_log.load() == confirmed


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"round": 1}', "null"])
def test_damaged_vote_log_raises_storage_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "vow.json").write_text(damage)
    with pytest.raises(StorageError, match=r"vow\.json is damaged: remove it"):
        VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1)).load()


def test_lock_with_a_wrong_signature_is_damage(tmp_path: Path) -> None:
    vote_log = VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1))
    vote = make_vote(tmp_path)
    assert vote.lock is not None
    vote.lock.signed.signature = bytes(64)
    vote_log.save(vote)
    with pytest.raises(StorageError, match="damaged"):
        vote_log.load()


def test_unwritable_folder_raises_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        VoteLog(tmp_path / "absent" / "vow.json", RUN_ID, terms_of(1)).save(make_vote(tmp_path))
