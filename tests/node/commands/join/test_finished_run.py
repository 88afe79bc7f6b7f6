"""What `murmur join` prints about a run that is over."""

import json
from pathlib import Path

import pytest

from node.commands.join import finished_run
from node.commands.join.finished_run import describe_end, describe_own_part, find_on_host
from node.daemon.lifecycle import FinishedRun
from node.run_dir import RunDir
from tests.node.daemon.receipts.example_commits import HOST, MARY, THREE_PEERS, chain, extend, log_in

URL = "https://run.example.org/run.toml"


def answering(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(finished_run, "is_served", lambda url, seconds: status == 200)


def test_newcomer_is_told_the_end_and_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 200)
    assert describe_end(FinishedRun(66, 3_631_104, 1.25, is_ours=False), URL, Path("/node")) == [
        "the run is over: round 66, 3,631,104 tokens, validation loss 1.250",
        "model: https://run.example.org/model",
        f"to get the model as a folder: murmur export {URL} OUT",
    ]


def test_loss_of_an_earlier_model_is_not_called_that_of_the_final_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 404)
    for measured, end in ((66, "validation loss 1.250"), (65, "validation loss 1.250 after round 65")):
        ended = FinishedRun(66, 100, 1.25, is_ours=False, validation_round=measured)
        assert describe_end(ended, URL, Path("/node"))[0] == f"the run is over: round 66, 100 tokens, {end}"


def test_peer_with_the_model_exports_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(monkeypatch, 404)
    node, ended = tmp_path / "my node", FinishedRun(8, 80, None, is_ours=True)
    (node / "checkpoints" / "0000000001.round-8").mkdir(parents=True)
    assert describe_end(ended, URL, node) == [
        "the run is over: round 8, 80 tokens",
        f"to get the model as a folder: murmur export '{node}' OUT",
    ]


def test_peer_with_one_stage_of_the_model_exports_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control: with the same round of the other stage it has the whole model."""
    answering(monkeypatch, 404)
    ended = FinishedRun(8, 80, None, is_ours=True)
    for folder, stage, number in ((tmp_path, 0, 8), (tmp_path / "stage-1", 1, 7), (tmp_path / "stage-1", 1, 8)):
        assert describe_end(ended, URL, tmp_path)[-1] == f"to get the model as a folder: murmur export {URL} OUT"
        (folder / "checkpoints" / f"000000000{number}.round-{number}").mkdir(parents=True)
        (folder / "stage.json").write_text(json.dumps({"stage": stage, "stages": 2}))
    assert describe_end(ended, URL, tmp_path)[-1] == f"to get the model as a folder: murmur export {tmp_path} OUT"


def test_no_page_is_asked_for_a_file_or_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, seconds: float) -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(finished_run, "is_served", refuse)
    link = "murmur://00@/ip4/192.0.2.1/tcp/1/p2p/Q"
    assert find_on_host("run.toml", "/model") is find_on_host(link, "/model") is None


def test_host_that_does_not_answer_is_not_named() -> None:
    assert find_on_host("http://127.0.0.1:9/run.toml", "/model") is None


def test_volunteer_is_told_its_part_and_its_receipt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control: a node without counted work says nothing about it."""
    extend(log_in(tmp_path), chain(THREE_PEERS))
    for peer, part in ((MARY, ["your part: 411 tokens in 4 rounds (45.7%); thank you"]), (HOST, [])):
        RunDir(tmp_path).write_node_info(peer.peer_id, (), 1)
        for status, receipt in (
            (200, f"https://run.example.org/receipts/{peer.peer_id}.json"),
            (404, f"murmur receipt {tmp_path} {peer.peer_id}"),
        ):
            answering(monkeypatch, status)
            assert describe_own_part(URL, tmp_path) == [*part, *([f"your receipt: {receipt}"] if part else [])]
    (tmp_path / "commits.log").write_text("junk")
    assert "not known" in describe_own_part(URL, tmp_path)[0]
    assert describe_own_part(URL, tmp_path / "nothing") == []
