from dataclasses import replace
from pathlib import Path

import pytest

from node.commands.up.report import (
    FinalReport,
    ModelEvaluation,
    SwarmResult,
    build_report,
    count_contributors,
    do_digests_agree,
    ring_all_reduce_bytes,
)
from node.commands.up.swarm_summary import PeerTotals
from node.monitoring.status import NodeStatus
from protocol.manifest.reading import load_manifest
from tests.node.daemon.receipts.example_commits import MARY, THREE_PEERS, chain, extend, log_in

MANIFEST = load_manifest(Path(__file__).parents[4] / "configs" / "demo.toml")
PROMISED = {
    "validation_loss",
    "initial_validation_loss",
    "tokens",
    "rounds",
    "parameters",
    "bytes_sent_per_peer",
    "bytes_all_reduce_per_peer",
    "compute_share",
    "digests",
    "peers_lost",
    "peers_rejoined",
    "checkpoint",
    "export",
}
FOUND = ModelEvaluation(Path("c"), Path("e"), 30, 1_000_000, 5.5, 1.9, "def f():\n    return")


def totals(sent: int) -> PeerTotals:
    status = NodeStatus(peer_id="p", run="d", run_id="0", bytes_sent=sent, seconds={"compute": 9.0, "wait": 1.0})
    return PeerTotals({0.0: status})


def outcome(
    sent: tuple[int, ...] = (10, 20, 30), before: int = 0, digests: tuple[str, ...] = ("d", "d", "d")
) -> SwarmResult:
    return SwarmResult(
        stages={},
        peer_totals=[totals(count) for count in sent],
        tokens=before + 3 * 600 * 2048,
        digests={f"peer-{index}": digest for index, digest in enumerate(digests)},
        tokens_before=before,
        peers_lost=1,
        peers_rejoined=1,
        seconds=61.26,
    )


def test_all_reduce_bytes_equal_the_sum_over_steps() -> None:
    """Per step, each of N peers sends N - 1 chunks of 1/N in the reduce-scatter and as many in the all-gather."""
    peers, parameters, steps = 4, 1000, 7
    chunk = 4 * parameters // peers
    sent = sum(chunk for _ in range(steps) for _ in range(2) for _ in range(peers - 1))
    assert ring_all_reduce_bytes(peers, parameters, tokens=steps * peers * 32, batch_tokens=32) == sent


def test_single_peer_would_have_sent_nothing() -> None:
    assert ring_all_reduce_bytes(1, 1000, 64, 32) == 0


def test_report_has_the_documented_fields() -> None:
    report = build_report(MANIFEST, outcome(), FOUND)
    assert set(report.model_dump()) >= PROMISED
    assert report.bytes_sent_per_peer == 30
    assert report.bytes_sent_mean == 20
    assert report.bytes_all_reduce_per_peer == round(2 * 2 / 3 * 4 * 1_000_000 * 600)
    assert report.byte_ratio == report.bytes_all_reduce_per_peer / 30
    assert report.compute_share == pytest.approx(0.9)
    assert report.rounds == 30
    assert report.seconds == 61.3
    assert report.agreed
    assert FinalReport.model_validate_json(report.model_dump_json()) == report


def test_resumed_swarm_counts_only_its_own_tokens() -> None:
    """Control: counted from the start of the run, the ratio would be too good."""
    resumed = build_report(MANIFEST, outcome(before=10**9), FOUND)
    assert resumed.byte_ratio == build_report(MANIFEST, outcome(), FOUND).byte_ratio
    whole = ring_all_reduce_bytes(3, 1_000_000, resumed.tokens, MANIFEST.train.batch_tokens)
    assert whole > 2 * resumed.bytes_all_reduce_per_peer


def test_ratio_is_null_if_nothing_was_sent() -> None:
    report = build_report(MANIFEST, outcome(sent=(0, 0, 0)), FOUND)
    assert report.byte_ratio is None
    assert any("nothing was sent" in line for line in report.lines())


@pytest.mark.parametrize(
    ("digests", "peers", "expected"),
    [
        ({"a": "1", "b": "1"}, 2, True),
        ({"a": "1", "b": "2"}, 2, False),
        ({"a": "1"}, 2, False),
        ({"a": "", "b": ""}, 2, False),
    ],
)
def test_digests_agree_only_if_every_peer_has_the_same(digests: dict[str, str], peers: int, expected: bool) -> None:
    assert do_digests_agree(digests, peers) is expected


def test_lines_of_the_report() -> None:
    text = "\n".join(build_report(MANIFEST, outcome(), FOUND).lines())
    assert "5.500 -> 1.900 nats" in text
    assert "lost 1, rejoined 1" in text
    assert "all 3 peers agree: d" in text
    assert "times fewer" in text
    assert "    def f():\n        return" in text


def test_peers_of_a_pipeline_send_activations_and_are_compared_with_no_all_reduce() -> None:
    cut = replace(outcome(), stages={"peer-0": 0, "peer-1": 1, "peer-2": 1})
    text = "\n".join(build_report(MANIFEST, cut, FOUND).lines())
    assert "with the activations of microbatches" in text and "times fewer" not in text


def test_lines_name_peers_that_differ() -> None:
    text = "\n".join(build_report(MANIFEST, outcome(digests=("d", "d", "")), FOUND).lines())
    assert "DIFFER: peer-0 d, peer-1 d, peer-2 none" in text


def test_contributors_are_those_of_the_longest_commit_log(tmp_path: Path) -> None:
    folders = [tmp_path / f"peer-{index}" for index in range(3)]
    extend(log_in(folders[0]), chain(THREE_PEERS[:2]))
    extend(log_in(folders[1]), chain(THREE_PEERS))
    mary = NodeStatus(peer_id=MARY.peer_id, name="peer-0", run="d", run_id="0", seconds={"compute": 9.0, "wait": 1.0})
    result = replace(outcome(), peer_totals=[PeerTotals({0.0: mary}), PeerTotals({})])
    contributors = count_contributors(folders, result)
    assert [one.tokens for one in contributors] == [411, 274, 215] and sum(one.share for one in contributors) == 1.0
    assert (contributors[0].name, contributors[0].seconds, contributors[0].rounds) == ("peer-0", 10.0, 4)
    assert "| peer-0 | 411 | 45.7% | 4 |" in build_report(MANIFEST, outcome(), FOUND, contributors).markdown()
    assert count_contributors(folders[2:], result) == ()
