"""The fold over events."""

import random

import pytest

from node.dashboard.events import (
    ChainForked,
    HostRestarted,
    LoggedEvent,
    PeerDeparted,
    PeersUpdated,
    RoundsMissing,
    SwarmFound,
    SwarmLost,
    ValidationMeasured,
)
from node.dashboard.state import (
    CHUNK_ROWS,
    MAX_GONE_PEERS,
    MAX_LOG_LINES,
    MAX_SPEEDS,
    MAX_TIMELINES,
    UNSEEN_SINCE_RESTART,
    RoundHistory,
    RunState,
    apply_event,
    timings_of_round,
)
from tests.node.dashboard.example_events import (
    NAMES,
    OPENED,
    apply_all,
    committed,
    joined,
    opening_events,
    peer_report,
    timed,
)


def test_the_same_events_give_the_same_state_and_change_no_earlier_one() -> None:
    events = [
        *opening_events(),
        *(committed(number) for number in range(5)),
        timed(3),
        PeerDeparted(at=1.0, peer=NAMES[1], reason=""),
    ]
    before = apply_all(events[:4])
    copy = apply_all(events[:4])
    assert apply_all(events) == apply_all(events)
    assert apply_all(events[4:], before) == apply_all(events)
    assert before == copy and before.index == 4


def test_every_durable_event_counts_and_moved_does_not() -> None:
    state = apply_all(opening_events())
    assert state.index == 3
    moved = apply_event(state, PeersUpdated(at=1.0, peers=(peer_report(NAMES[0], round=7),)))
    assert moved.index == 3 and moved.peers[NAMES[0]].report.round == 7


def test_a_round_becomes_a_row() -> None:
    row = apply_all([*opening_events(), committed(0), committed(1, loss=2.0)]).rows.last
    assert row is not None
    assert (row.round, row.tokens, row.loss, row.contributors, row.seconds) == (1, 400, 2.0, 2, 2.0)
    assert row.contribution_bytes == 500.0
    assert row.all_reduce_bytes == 2 * (2 - 1) / 2 * 4 * 1000 * 10  # a ring of two, 1000 parameters, ten steps


def test_the_loss_is_weighted_by_tokens() -> None:
    event = committed(0)
    heavy = event.given[0].model_copy(update={"tokens": 300, "loss": 1.0})
    row = apply_all([OPENED, event.model_copy(update={"given": (heavy, event.given[1])})]).rows.last
    assert row is not None and row.loss == pytest.approx((300 * 1.0 + 100 * 3.0) / 400)


def test_a_round_that_was_learned_late_has_no_duration_and_gives_none_to_the_next() -> None:
    rows = list(apply_all([*opening_events(), committed(0), committed(1, at=None), committed(2), committed(3)]).rows)
    assert [row.seconds for row in rows] == [None, None, None, 2.0]


def test_who_gave_and_who_was_late() -> None:
    state = apply_all([*opening_events(), committed(0), committed(1, NAMES[:1], late=[NAMES[1]])])
    assert (state.peers[NAMES[0]].included_count, state.peers[NAMES[0]].missed_count) == (2, 0)
    assert (state.peers[NAMES[1]].included_count, state.peers[NAMES[1]].missed_count) == (1, 1)
    assert not state.peers[NAMES[1]].in_time and "not in time" in state.log[-1].text


def test_a_contribution_tells_where_a_peer_stands_when_nothing_else_does() -> None:
    quiet = joined(NAMES[2], tokens_per_second=0.0)
    events = [*opening_events(), quiet, committed(0), committed(1, NAMES[:3], loss=2.5)]
    now = apply_all(events).peers[NAMES[2]].report
    assert (now.round, now.loss, now.tokens_per_second) == (2, 2.5, 100 / 2.0)
    assert apply_all(events).peers[NAMES[0]].report.tokens_per_second == 50.0  # what it says of itself


def test_what_was_measured_afterwards_finds_its_round() -> None:
    state = apply_all([*opening_events(), committed(0), committed(1), timed(0, sent=4000)])
    state = apply_all(
        [
            ValidationMeasured(at=1.0, peer=NAMES[0], round=1, loss=2.5),
            ValidationMeasured(at=1.0, peer=NAMES[0], round=9, loss=1),
        ],
        state,
    )
    first, second = state.rows
    assert (first.sent_bytes, first.validation_loss, second.sent_bytes, second.validation_loss) == (
        4000.0,
        2.5,
        None,
        None,
    )
    assert state.sent_bytes == 4000.0 and state.all_reduce_bytes == first.all_reduce_bytes
    assert timings_of_round(state, None)[0] == 0 and timings_of_round(state, 7) == (7, ())


def test_a_fork_voids_what_followed() -> None:
    events = [*opening_events(), *(committed(number) for number in range(6)), timed(4)]
    state = apply_all([*events, ChainForked(at=1.0, round=3)])
    assert [row.round for row in state.rows] == [0, 1, 2] and not state.timelines
    assert (
        apply_all([committed(3)], state).rows.last
        == apply_all([*opening_events(), *map(committed, range(4))]).rows.last
    )


def test_leaving_and_coming_back() -> None:
    state = apply_all([*opening_events(), PeerDeparted(at=5.0, peer=NAMES[0], reason="left")])
    assert state.peers[NAMES[0]].gone_at == 5.0 and list(state.live) == [NAMES[1]]
    back = apply_event(state, joined(NAMES[0], at=9.0))
    assert back.peers[NAMES[0]].gone_at is None and back.peers[NAMES[0]].since == 9.0
    assert apply_event(state, PeerDeparted(at=5.0, peer=NAMES[3], reason="")).peers == state.peers


def test_a_hosts_own_start_is_no_coming_and_going_of_peers() -> None:
    state = apply_all([*opening_events(), HostRestarted(at=50.0)])
    assert not state.live and {peer.reason for peer in state.peers.values()} == {UNSEEN_SINCE_RESTART}
    seen = apply_all([joined(NAMES[0], at=51.0)], state)
    assert seen.log == state.log and NAMES[0] in seen.live
    assert len(apply_all([joined(NAMES[2], at=51.0)], state).log) == len(state.log) + 1


def test_lost_found_and_missing() -> None:
    state = apply_all([*opening_events(), SwarmLost(at=7.0)])
    assert state.lost_since == 7.0
    state = apply_all([SwarmFound(at=8.0), RoundsMissing(at=8.0, first=3, last=5)], state)
    assert state.lost_since is None and state.missing_rounds == 3


def test_what_grows_is_bounded() -> None:
    crowd = [f"peer-{number}" for number in range(MAX_GONE_PEERS + 50)]
    events: list[LoggedEvent] = [*opening_events()]
    events += [joined(name) for name in crowd] + [PeerDeparted(at=1.0, peer=name, reason="expired") for name in crowd]
    events += [event for number in range(60) for event in (committed(number), timed(number))]
    state = apply_all(events)
    assert len(state.log) == MAX_LOG_LINES and len(state.timelines) == MAX_TIMELINES
    assert len(state.peers) == MAX_GONE_PEERS + 2
    assert len(state.peers[NAMES[0]].speeds) == MAX_SPEEDS


def test_rows_are_whole_however_many_and_share_what_is_old() -> None:
    state = apply_all([OPENED, *(committed(number) for number in range(3 * CHUNK_ROWS + 5))])
    assert [row.round for row in state.rows] == list(range(3 * CHUNK_ROWS + 5)) and len(
        state.rows
    ) == 3 * CHUNK_ROWS + 5
    later = apply_event(state, committed(3 * CHUNK_ROWS + 5))
    assert later.rows.chunks[0] is state.rows.chunks[0]
    assert [row.round for row in later.rows.truncate_from(CHUNK_ROWS + 3)] == list(range(CHUNK_ROWS + 3))
    assert [row.round for row in state.rows.recent(4)] == [3 * CHUNK_ROWS + number for number in range(1, 5)]
    at_the_seam = apply_all([OPENED, *(committed(number) for number in range(CHUNK_ROWS))]).rows
    assert at_the_seam.last is not None and at_the_seam.last.round == CHUNK_ROWS - 1 and RoundHistory().last is None


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_breaks_it(seed: int) -> None:
    events: list[LoggedEvent] = [
        *opening_events(),
        *map(committed, range(5)),
        timed(2),
        PeerDeparted(at=2.0, peer=NAMES[0], reason="x"),
    ]
    events += [
        ChainForked(at=1.0, round=2),
        HostRestarted(at=3.0),
        RoundsMissing(at=1.0, first=1, last=2),
        joined(NAMES[2]),
    ]
    random.Random(seed).shuffle(events)
    assert apply_all(events, RunState()).index == len(events)


def test_when_the_newest_event_was_also_one_that_the_log_does_not_tell() -> None:
    state = apply_all([*opening_events(), committed(0, at=1500.0)])
    assert state.newest_at == 1500.0 > max(line.at for line in state.log)
    assert apply_all([committed(1, at=None)], state).newest_at == 1500.0
