"""The fold over events."""

import random

import pytest

from node.host.events import Durable, Forked, Found, Left, Lost, Measured, Missing, Moved, Started
from node.host.state import (
    CHUNK,
    KEPT_GONE,
    KEPT_LINES,
    KEPT_SPEEDS,
    KEPT_TIMELINES,
    UNSEEN,
    Rows,
    State,
    apply,
    lanes_of,
)
from tests.node.host.story import NAMES, OPENED, beginning, committed, folded, joined, now_of, timed


def test_the_same_events_give_the_same_state_and_change_no_earlier_one() -> None:
    events = [
        *beginning(),
        *(committed(number) for number in range(5)),
        timed(3),
        Left(at=1.0, peer=NAMES[1], reason=""),
    ]
    before = folded(events[:4])
    copy = folded(events[:4])
    assert folded(events) == folded(events)
    assert folded(events[4:], before) == folded(events)
    assert before == copy and before.index == 4


def test_every_durable_event_counts_and_moved_does_not() -> None:
    state = folded(beginning())
    assert state.index == 3
    moved = apply(state, Moved(at=1.0, peers=(now_of(NAMES[0], round=7),)))
    assert moved.index == 3 and moved.peers[NAMES[0]].now.round == 7


def test_a_round_becomes_a_row() -> None:
    row = folded([*beginning(), committed(0), committed(1, loss=2.0)]).rows.last
    assert row is not None
    assert (row.round, row.tokens, row.loss, row.contributors, row.seconds) == (1, 400, 2.0, 2, 2.0)
    assert row.message == 500.0
    assert row.raw == 2 * (2 - 1) / 2 * 4 * 1000 * 10  # a ring of two, 1000 parameters, ten steps


def test_the_loss_is_weighted_by_tokens() -> None:
    event = committed(0)
    heavy = event.given[0].model_copy(update={"tokens": 300, "loss": 1.0})
    row = folded([OPENED, event.model_copy(update={"given": (heavy, event.given[1])})]).rows.last
    assert row is not None and row.loss == pytest.approx((300 * 1.0 + 100 * 3.0) / 400)


def test_a_round_that_was_learned_late_has_no_duration_and_gives_none_to_the_next() -> None:
    rows = list(folded([*beginning(), committed(0), committed(1, at=None), committed(2), committed(3)]).rows)
    assert [row.seconds for row in rows] == [None, None, None, 2.0]


def test_who_gave_and_who_was_late() -> None:
    state = folded([*beginning(), committed(0), committed(1, NAMES[:1], late=[NAMES[1]])])
    assert (state.peers[NAMES[0]].given, state.peers[NAMES[0]].missed) == (2, 0)
    assert (state.peers[NAMES[1]].given, state.peers[NAMES[1]].missed) == (1, 1)
    assert not state.peers[NAMES[1]].in_time and "not in time" in state.log[-1].text


def test_a_contribution_tells_where_a_peer_stands_when_nothing_else_does() -> None:
    quiet = joined(NAMES[2], tokens_per_second=0.0)
    events = [*beginning(), quiet, committed(0), committed(1, NAMES[:3], loss=2.5)]
    now = folded(events).peers[NAMES[2]].now
    assert (now.round, now.loss, now.tokens_per_second) == (2, 2.5, 100 / 2.0)
    assert folded(events).peers[NAMES[0]].now.tokens_per_second == 50.0  # what it says of itself


def test_what_was_measured_afterwards_finds_its_round() -> None:
    state = folded([*beginning(), committed(0), committed(1), timed(0, sent=4000)])
    state = folded(
        [Measured(at=1.0, peer=NAMES[0], round=1, loss=2.5), Measured(at=1.0, peer=NAMES[0], round=9, loss=1)], state
    )
    first, second = state.rows
    assert (first.sent, first.validation, second.sent, second.validation) == (4000.0, 2.5, None, None)
    assert state.sent == 4000.0 and state.raw == first.raw
    assert lanes_of(state, None)[0] == 0 and lanes_of(state, 7) == (7, ())


def test_a_fork_voids_what_followed() -> None:
    events = [*beginning(), *(committed(number) for number in range(6)), timed(4)]
    state = folded([*events, Forked(at=1.0, round=3)])
    assert [row.round for row in state.rows] == [0, 1, 2] and not state.timelines
    assert folded([committed(3)], state).rows.last == folded([*beginning(), *map(committed, range(4))]).rows.last


def test_leaving_and_coming_back() -> None:
    state = folded([*beginning(), Left(at=5.0, peer=NAMES[0], reason="left")])
    assert state.peers[NAMES[0]].gone == 5.0 and list(state.live) == [NAMES[1]]
    back = apply(state, joined(NAMES[0], at=9.0))
    assert back.peers[NAMES[0]].gone is None and back.peers[NAMES[0]].since == 9.0
    assert apply(state, Left(at=5.0, peer=NAMES[3], reason="")).peers == state.peers


def test_a_hosts_own_start_is_no_coming_and_going_of_peers() -> None:
    state = folded([*beginning(), Started(at=50.0)])
    assert not state.live and {peer.reason for peer in state.peers.values()} == {UNSEEN}
    seen = folded([joined(NAMES[0], at=51.0)], state)
    assert seen.log == state.log and NAMES[0] in seen.live
    assert len(folded([joined(NAMES[2], at=51.0)], state).log) == len(state.log) + 1


def test_lost_found_and_missing() -> None:
    state = folded([*beginning(), Lost(at=7.0)])
    assert state.lost == 7.0
    state = folded([Found(at=8.0), Missing(at=8.0, first=3, last=5)], state)
    assert state.lost is None and state.missing == 3


def test_what_grows_is_bounded() -> None:
    crowd = [f"peer-{number}" for number in range(KEPT_GONE + 50)]
    events: list[Durable] = [*beginning()]
    events += [joined(name) for name in crowd] + [Left(at=1.0, peer=name, reason="expired") for name in crowd]
    events += [event for number in range(60) for event in (committed(number), timed(number))]
    state = folded(events)
    assert len(state.log) == KEPT_LINES and len(state.timelines) == KEPT_TIMELINES
    assert len(state.peers) == KEPT_GONE + 2
    assert len(state.peers[NAMES[0]].speeds) == KEPT_SPEEDS


def test_rows_are_whole_however_many_and_share_what_is_old() -> None:
    state = folded([OPENED, *(committed(number) for number in range(3 * CHUNK + 5))])
    assert [row.round for row in state.rows] == list(range(3 * CHUNK + 5)) and len(state.rows) == 3 * CHUNK + 5
    later = apply(state, committed(3 * CHUNK + 5))
    assert later.rows.chunks[0] is state.rows.chunks[0]
    assert [row.round for row in later.rows.before(CHUNK + 3)] == list(range(CHUNK + 3))
    assert [row.round for row in state.rows.recent(4)] == [3 * CHUNK + number for number in range(1, 5)]
    at_the_seam = folded([OPENED, *(committed(number) for number in range(CHUNK))]).rows
    assert at_the_seam.last is not None and at_the_seam.last.round == CHUNK - 1 and Rows().last is None


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_breaks_it(seed: int) -> None:
    events: list[Durable] = [*beginning(), *map(committed, range(5)), timed(2), Left(at=2.0, peer=NAMES[0], reason="x")]
    events += [Forked(at=1.0, round=2), Started(at=3.0), Missing(at=1.0, first=1, last=2), joined(NAMES[2])]
    random.Random(seed).shuffle(events)
    assert folded(events, State()).index == len(events)


def test_when_the_newest_event_was_also_one_that_the_log_does_not_tell() -> None:
    state = folded([*beginning(), committed(0, at=1500.0)])
    assert state.newest == 1500.0 > max(line.at for line in state.log)
    assert folded([committed(1, at=None)], state).newest == 1500.0
