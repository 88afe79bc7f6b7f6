"""Each contributor's tokens, rounds, time and bytes."""

import pytest

from node.dashboard import contributors as module
from node.dashboard.contributors import Contributed, Contributors
from node.dashboard.events import ChainForked, PeerDeparted
from node.dashboard.json_views import snapshot
from tests.node.dashboard.example_events import NAMES, apply_all, committed, opening_events

RUN = [*opening_events(), *map(committed, range(3)), committed(3, NAMES[:1])]


def test_sums_count_included_rounds_and_their_time() -> None:
    found = apply_all(RUN).contributors
    assert found.of(NAMES[0]) == Contributed(tokens=400, rounds=4, seconds=6.0, size=2000)
    assert found.of(NAMES[1]) == Contributed(tokens=300, rounds=3, seconds=4.0, size=1500)
    assert found.of("nobody") == Contributed()


def test_undated_round_counts_as_long_as_recent_ones() -> None:
    found = apply_all([*RUN[:6], committed(3, at=None)]).contributors
    assert found.of(NAMES[0]).seconds == 6.0


def test_fork_takes_contributions_back() -> None:
    assert apply_all([*RUN, ChainForked(at=1.0, round=1)]).contributors == apply_all(RUN[:4]).contributors
    assert not apply_all([*RUN, ChainForked(at=1.0, round=0)]).contributors.by_peer


def test_shares_add_up_and_outlast_the_peer() -> None:
    state = apply_all([*RUN, PeerDeparted(at=1.0, peer=NAMES[1], reason="left")])
    peers = {peer["peer"]: peer for peer in snapshot(state, 1.0)["peers"]}
    last = state.rows.last
    assert last is not None
    assert peers[NAMES[1]]["share"] == 300 / last.tokens and peers[NAMES[1]]["given_rounds"] == 3


def test_contributors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONTRIBUTORS", 3)
    found = Contributors()
    for number, peer in enumerate(NAMES):
        given = tuple(one.model_copy(update={"tokens": 100 - number}) for one in committed(number, [peer]).given)
        found = found.add_round(number, 2.0, given)
    assert set(found.by_peer) == set(NAMES[:3])
