"""`murmur receipt` and `murmur verify` on the folder of a host."""

import json
from pathlib import Path

import pytest

from node.commands.receipts import VerifyOptions, find_peer, verify_files, write_receipts
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.dashboard.event_log import EVENT_FILE_NAME, EventLog
from protocol.errors import MissingFileError, ReceiptError, UsageError
from protocol.identity import Identity
from tests.node.daemon.receipts.example_commits import MARY, THREE_PEERS, TOM, ZOE, chain, extend, log_in
from tests.node.dashboard.example_events import OPENED, joined
from tests.node.small_run import MANIFEST


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(MANIFEST.to_toml())
    event_log = EventLog.open(tmp_path / EVENT_FILE_NAME, OPENED)
    for peer, name in ((MARY, "mary"), (TOM, "../../tom\x1b[2J"), (ZOE, "")):
        event_log.record(joined(peer.peer_id, name=name))
    event_log.close()
    extend(log_in(tmp_path), chain(THREE_PEERS))
    return tmp_path


def test_receipts_of_everybody_are_written_and_verified(host: Path) -> None:
    lines = write_receipts(host, None, None)
    files = sorted((host / "receipts").iterdir())
    assert len(files) == 3 and all(file.parent == host / "receipts" for file in files)
    assert lines[-2] == "together 900 tokens in 5 rounds"
    checked = verify_files(files, host / COMMIT_FILE_NAME)
    assert len(checked) == 6 and checked[-3] == "together 900 of 900 tokens of the run, exactly"
    assert checked[-2] == "a quorum of all voters acknowledged each of the 5 rounds"
    assert any(
        line.startswith("agrees with the commits: mary gave 411 tokens in 4 rounds of run small (45.7%)")
        for line in checked
    )
    assert not any("\x1b" in line for line in checked), "the name of a peer cannot control the terminal"
    assert "receipts for 274 tokens are not among them" in verify_files(
        [file for file in files if "tom" not in file.name], host / COMMIT_FILE_NAME
    )[-3]  # fmt: skip


def test_receipt_of_one_peer_by_name(host: Path) -> None:
    out = host / "mary.json"
    write_receipts(host, "mary", out)
    issuer = json.loads(out.read_text())["issuer"]
    assert issuer == Identity.load_or_create(host / "key").peer_id
    line, *_ = verify_files([out], host / COMMIT_FILE_NAME, VerifyOptions(issuer))
    assert line.startswith("valid: mary")
    with pytest.raises(ReceiptError, match="is signed by"):
        verify_files([out], host / COMMIT_FILE_NAME, VerifyOptions(TOM.peer_id))


def test_peer_is_found_by_id_end_of_id_or_name() -> None:
    names = {MARY.peer_id: "mary", TOM.peer_id: "tom", ZOE.peer_id: "tom"}
    peers = list(names)
    assert find_peer("mary", names, peers) == find_peer(MARY.peer_id[-6:], names, peers) == MARY.peer_id
    assert find_peer(f"..{TOM.peer_id[-6:]}", names, peers) == find_peer(TOM.peer_id, names, peers) == TOM.peer_id
    with pytest.raises(UsageError, match="2 peers are called tom"):
        find_peer("tom", names, peers)
    with pytest.raises(UsageError, match="there is work of"):
        find_peer("nobody", names, peers)


def test_wrong_files_are_one_line_each(host: Path, tmp_path: Path) -> None:
    commits, junk = host / COMMIT_FILE_NAME, tmp_path / "junk"
    junk.write_text("{}")
    with pytest.raises(ReceiptError, match="is not a receipt"):
        verify_files([junk], commits)
    write_receipts(host, "mary", tmp_path / "mary.json")
    with pytest.raises(ReceiptError, match="does not hold the commits"):
        verify_files([tmp_path / "mary.json"], junk)
    with pytest.raises(MissingFileError):
        verify_files([tmp_path / "nothing"], commits)
    with pytest.raises(UsageError, match=r"has no commits\.log"):
        write_receipts(tmp_path / "receipts", None, None)
