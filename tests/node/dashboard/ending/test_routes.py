"""The receipts of a host, over real sockets."""

from pathlib import Path

import pytest

from node.daemon.receipts.receipt import ReceiptIssuer, read_receipt, verify_receipts
from node.dashboard.event_log import EventLog
from node.dashboard.server import DashboardData
from tests.node.daemon.receipts.example_commits import (
    HOST,
    MARY,
    THREE_PEERS,
    TOM,
    ZOE,
    chain,
    chain_to,
    extend,
    log_in,
)
from tests.node.dashboard.serving.test_server import RUN, served, the_manifest

pytestmark = pytest.mark.slow

COMMITS = chain(THREE_PEERS)


def issuer_in(folder: Path) -> ReceiptIssuer:
    log = log_in(folder)
    extend(log, COMMITS)
    return ReceiptIssuer(log, "small", HOST, lambda peer: "mary" if peer == MARY.peer_id else "")


async def test_downloaded_receipts_verify_against_the_downloaded_commits(tmp_path: Path) -> None:
    data = DashboardData(EventLog(None, RUN), the_manifest, receipts=issuer_in(tmp_path))
    async with served(data) as client:
        overview = (await client.get("/receipts.json")).json()
        assert sum(peer["tokens"] for peer in overview["peers"]) == overview["tokens"] == 900
        first = {"peer": MARY.peer_id, "name": "mary", "tokens": 411, "rounds": 4, "groups": 0, "rollout_tokens": 0}
        assert overview["peers"][0] == first
        downloads = tmp_path / "downloads"
        downloads.mkdir()
        (downloads / "commits.log").write_bytes((await client.get("/commits.log")).content)
        for peer in overview["peers"]:
            answer = await client.get(f"/receipts/{peer['peer']}.json")
            assert answer.headers["content-disposition"].endswith(f'{peer["peer"][-6:]}.json"')
            (downloads / f"{peer['peer']}.json").write_bytes(answer.content)
        receipts = [read_receipt(downloads / f"{peer.peer_id}.json") for peer in (MARY, TOM, ZOE)]
        verify_receipts(receipts, downloads / "commits.log")
        assert sum(receipt.tokens for receipt in receipts) == 900
        for wrong in (HOST.peer_id, "nobody", "%2e%2e%2fkey"):
            assert (await client.get(f"/receipts/{wrong}.json")).status_code == 404


async def test_receipt_is_built_once_per_round(tmp_path: Path) -> None:
    issuer = issuer_in(tmp_path)
    first = await issuer.issue(MARY.peer_id)
    assert first is not None and await issuer.issue(MARY.peer_id) is first
    log = issuer._commit_log
    extend(log, chain([{1: (5, 0)}], chain_to(COMMITS)), COMMITS)
    later = await issuer.issue(MARY.peer_id)
    assert later is not None and later.tokens == first.tokens + 5


async def test_replay_serves_no_receipts() -> None:
    async with served(DashboardData(EventLog(None, RUN), None)) as client:
        assert (await client.get("/receipts.json")).status_code == 404
