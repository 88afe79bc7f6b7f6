"""Each judgement, on a machine that is fit and on one that is not."""

import pytest

from node.doctor.findings import (
    Finding,
    judged_addresses,
    judged_clock,
    judged_dial_back,
    judged_microbatch,
    judged_nat,
    judged_peers,
    judged_public,
    judged_room,
    judged_speed,
    judged_versions,
)
from tests.node.small_run import MANIFEST

NOWHERE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"
HOME, PUBLIC, OTHER = "/ip4/192.168.1.5/tcp/4001", "/ip4/8.8.8.8/tcp/4001", "/ip4/9.9.9.9/tcp/4001"
RELAYED = "/ip4/8.8.4.4/tcp/4001/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo/p2p-circuit"


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (judged_room("disk", 5e9, 4e9, "free some"), "ok"),
        (judged_room("disk", 3e9, 4e9, "free some"), "fail"),
        (judged_clock([], ""), "ok"),
        (judged_clock([2.0], "the host"), "ok"),
        (judged_clock([-30.0], "the host"), "warn"),
        (judged_clock([3600.0, 3601.0, 0.0], "the run's peers"), "fail"),
        (judged_clock([3600.0, 0.1, 0.0], "the run's peers"), "ok"),  # one peer's clock is wrong, not ours
        (judged_addresses([HOME, PUBLIC]), "ok"),
        (judged_addresses([HOME, "/ip6/fe80::1/tcp/1", "/dns/x/tcp/1"]), "warn"),
        (judged_peers([(NOWHERE, 0.2), (NOWHERE, "no")]), "ok"),
        (judged_peers([(NOWHERE, "no")]), "fail"),
        (judged_peers([]), "warn"),
        (judged_public([NOWHERE, PUBLIC]), "ok"),
        (judged_public([NOWHERE, HOME]), "warn"),
        (judged_microbatch(MANIFEST, 1e9, "cpu"), "ok"),
        (judged_microbatch(MANIFEST, 4e4, "cuda"), "warn"),
        (judged_microbatch(MANIFEST, 0.0, "cpu"), "fail"),
        (judged_nat([HOME, PUBLIC], [PUBLIC, PUBLIC]), "ok"),
        (judged_nat([HOME], [PUBLIC]), "warn"),
        (judged_nat([HOME], [PUBLIC, OTHER]), "warn"),
        (judged_dial_back({"a": True, "b": False}, 4001), "ok"),
        (judged_dial_back({"a": False}, 4001), "warn"),
        (judged_speed(8_000_000, 2.0, 40_000_000, 60.0), "ok"),
        (judged_speed(8_000_000, 2.0, 4_000_000_000, 60.0), "warn"),
        (judged_speed(0, 6.0, 4_000_000_000, 60.0), "fail"),
        (judged_versions("1.0", {"1.0", "0.9"}), "ok"),
        (judged_versions("1.0", {"0.9", ""}), "warn"),
    ],
)
def test_what_is_not_ok_has_a_mend(finding: Finding | None, level: str) -> None:
    assert finding and finding.level == level and finding.found and bool(finding.mend) == (level != "ok")


def test_what_nobody_told_is_not_judged() -> None:
    assert judged_nat([HOME], []) is None and judged_nat([HOME], [RELAYED]) is None
    assert judged_dial_back({}, 4001) is None and judged_versions("1.0", {""}) is None
