from pathlib import Path

import pytest

from node.checkpoints.vote_log import VoteLog
from protocol.consensus.chain import genesis_head
from protocol.consensus.events import VoteRecord
from protocol.consensus.messages import Commit
from protocol.errors import StorageError
from tests.node.small_run import PEERS, RUN_ID, contribution_of, payload, stated, store_in, terms_of

HEAD = genesis_head(RUN_ID)
MEMBERS = frozenset(identity.peer_id for identity in PEERS[:3])


def vow_in(folder: Path, view: int = 4) -> VoteRecord:
    blob = store_in(folder / "blobs").put(payload(1, 10))
    offered = stated(PEERS[1], contribution_of(HEAD, [blob]))
    lock = stated(PEERS[0], Commit(HEAD.round, 1, HEAD.digest, (offered,), ()))
    return VoteRecord(HEAD.round, HEAD.digest, view, lock, MEMBERS)


def test_a_vow_is_there_after_a_start(tmp_path: Path) -> None:
    file = VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1))
    assert file.load() is None
    for vow in (vow_in(tmp_path), VoteRecord(7, bytes(32), 0, None, MEMBERS)):
        file.save(vow)
        assert VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1)).load() == vow


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"round": 1}', "null"])
def test_a_damaged_vow_is_told_and_not_passed_over(tmp_path: Path, damage: str) -> None:
    (tmp_path / "vow.json").write_text(damage)
    with pytest.raises(StorageError, match=r"vow\.json is damaged: remove it"):
        VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1)).load()


def test_a_lock_that_nobody_signed_is_damage(tmp_path: Path) -> None:
    file = VoteLog(tmp_path / "vow.json", RUN_ID, terms_of(1))
    vow = vow_in(tmp_path)
    assert vow.lock is not None
    vow.lock.signed.signature = bytes(64)
    file.save(vow)
    with pytest.raises(StorageError, match="damaged"):
        file.load()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        VoteLog(tmp_path / "absent" / "vow.json", RUN_ID, terms_of(1)).save(vow_in(tmp_path))
