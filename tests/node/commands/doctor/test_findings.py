"""Each judgement, for a good measurement and a bad one."""

import pytest

from node.commands.doctor.checks import (
    Check,
    judge_addresses,
    judge_bandwidth,
    judge_clock,
    judge_dial_back,
    judge_free_space,
    judge_microbatch,
    judge_nat,
    judge_peers,
    judge_public_peers,
    judge_versions,
)
from node.model.memory_estimate import fixed_bytes
from tests.node.small_run import MANIFEST

NOWHERE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"
HOME, PUBLIC, OTHER = "/ip4/192.168.1.5/tcp/4001", "/ip4/8.8.8.8/tcp/4001", "/ip4/9.9.9.9/tcp/4001"
RELAYED = "/ip4/8.8.4.4/tcp/4001/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo/p2p-circuit"


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (judge_free_space("disk", 5e9, 4e9, "free some"), "ok"),
        (judge_free_space("disk", 3e9, 4e9, "free some"), "fail"),
        (judge_clock([], ""), "ok"),
        (judge_clock([2.0], "the host"), "ok"),
        (judge_clock([-30.0], "the host"), "warn"),
        (judge_clock([3600.0, 3601.0, 0.0], "the run's peers"), "fail"),
        (judge_clock([3600.0, 0.1, 0.0], "the run's peers"), "ok"),  # one peer's clock is wrong, not ours
        (judge_addresses([HOME, PUBLIC]), "ok"),
        (judge_addresses([HOME, "/ip6/fe80::1/tcp/1", "/dns/x/tcp/1"]), "warn"),
        (judge_peers([(NOWHERE, 0.2), (NOWHERE, "no")]), "ok"),
        (judge_peers([(NOWHERE, "no")]), "fail"),
        (judge_peers([]), "warn"),
        (judge_public_peers([NOWHERE, PUBLIC]), "ok"),
        (judge_public_peers([NOWHERE, HOME]), "warn"),
        (judge_microbatch(MANIFEST, 1e9, "cpu"), "ok"),
        (judge_microbatch(MANIFEST, 4e4, "cuda"), "warn"),
        (judge_microbatch(MANIFEST, 0.0, "cpu"), "fail"),
        (judge_microbatch(MANIFEST, 0.0, "cuda", 8), "fail"),
        (judge_nat([HOME, PUBLIC], [PUBLIC, PUBLIC]), "ok"),
        (judge_nat([HOME], [PUBLIC]), "warn"),
        (judge_nat([HOME], [PUBLIC, OTHER]), "warn"),
        (judge_dial_back({"a": True, "b": False}, 4001), "ok"),
        (judge_dial_back({"a": False}, 4001), "warn"),
        (judge_bandwidth(8_000_000, 2.0, 40_000_000, 60.0), "ok"),
        (judge_bandwidth(8_000_000, 2.0, 4_000_000_000, 60.0), "warn"),
        (judge_bandwidth(0, 6.0, 4_000_000_000, 60.0), "fail"),
        (judge_versions("1.0", {"1.0", "0.9"}), "ok"),
        (judge_versions("1.0", {"0.9", ""}), "warn"),
    ],
)
def test_findings_that_are_not_ok_say_what_to_fix(finding: Check | None, level: str) -> None:
    assert finding and finding.level == level and finding.found and bool(finding.mend) == (level != "ok")


def test_missing_measurements_give_no_finding() -> None:
    assert judge_nat([HOME], []) is None and judge_nat([HOME], [RELAYED]) is None
    assert judge_dial_back({}, 4001) is None and judge_versions("1.0", {""}) is None


def test_other_cards_are_named_where_they_help() -> None:
    deep = MANIFEST.model_copy(update={"model": MANIFEST.model.model_copy(update={"layers": 64})})
    free = fixed_bytes(deep, "cuda")
    alone, together = judge_microbatch(deep, free, "cuda"), judge_microbatch(deep, free, "cuda", 4)
    assert alone.level == "fail" and alone.mend == "this device is too small for the run"
    assert together.level == "warn" and together.mend.startswith("use --device all: 4 cards hold a part")
