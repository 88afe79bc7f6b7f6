"""The state of a run after its events."""

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
from node.dashboard.log_text import MAX_LOG_LINES
from node.dashboard.rounds import CHUNK_ROWS, RoundHistory
from node.dashboard.state import (
    MAX_GONE_PEERS,
    MAX_SPEEDS,
    MAX_TIMELINES,
    UNSEEN_SINCE_RESTART,
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


def test_same_events_give_the_same_state_and_leave_earlier_states() -> None:
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


def test_only_durable_events_are_counted() -> None:
    state = apply_all(opening_events())
    assert state.index == 3
    moved = apply_event(state, PeersUpdated(at=1.0, peers=(peer_report(NAMES[0], round=7),)))
    assert moved.index == 3 and moved.peers[NAMES[0]].report.round == 7


def test_committed_round_becomes_a_row() -> None:
    row = apply_all([*opening_events(), committed(0), committed(1, loss=2.0)]).rows.last
    assert row is not None
    assert (row.round, row.tokens, row.loss, row.contributors, row.seconds) == (1, 400, 2.0, 2, 2.0)
    assert row.contribution_bytes == 500.0
    assert row.all_reduce_bytes == 2 * (2 - 1) / 2 * 4 * 1000 * 10  # a ring of two, 1000 parameters, ten steps


def test_loss_is_weighted_by_tokens() -> None:
    event = committed(0)
    heavy = event.given[0].model_copy(update={"tokens": 300, "loss": 1.0})
    row = apply_all([OPENED, event.model_copy(update={"given": (heavy, event.given[1])})]).rows.last
    assert row is not None and row.loss == pytest.approx((300 * 1.0 + 100 * 3.0) / 400)


def test_undated_round_gives_no_duration_to_itself_or_the_next() -> None:
    rows = list(apply_all([*opening_events(), committed(0), committed(1, at=None), committed(2), committed(3)]).rows)
    assert [row.seconds for row in rows] == [None, None, None, 2.0]


def test_contributors_and_late_peers_are_counted() -> None:
    state = apply_all([*opening_events(), committed(0), committed(1, NAMES[:1], late=[NAMES[1]])])
    assert (state.peers[NAMES[0]].included_count, state.peers[NAMES[0]].missed_count) == (2, 0)
    assert (state.peers[NAMES[1]].included_count, state.peers[NAMES[1]].missed_count) == (1, 1)
    assert not state.peers[NAMES[1]].in_time and "not in time" in state.log[-1].text


def test_contribution_updates_a_peer_without_other_reports() -> None:
    quiet = joined(NAMES[2], tokens_per_second=0.0)
    events = [*opening_events(), quiet, committed(0), committed(1, NAMES[:3], loss=2.5)]
    now = apply_all(events).peers[NAMES[2]].report
    assert (now.round, now.loss, now.tokens_per_second) == (2, 2.5, 100 / 2.0)
    assert apply_all(events).peers[NAMES[0]].report.tokens_per_second == 50.0  # as the peer reports


def test_later_measurements_are_added_to_their_round() -> None:
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


def test_fork_removes_the_later_rounds() -> None:
    events = [*opening_events(), *(committed(number) for number in range(6)), timed(4)]
    state = apply_all([*events, ChainForked(at=1.0, round=3)])
    assert [row.round for row in state.rows] == [0, 1, 2] and not state.timelines
    assert (
        apply_all([committed(3)], state).rows.last
        == apply_all([*opening_events(), *map(committed, range(4))]).rows.last
    )


def test_peer_leaves_and_comes_back() -> None:
    state = apply_all([*opening_events(), PeerDeparted(at=5.0, peer=NAMES[0], reason="left")])
    assert state.peers[NAMES[0]].gone_at == 5.0 and list(state.live) == [NAMES[1]]
    back = apply_event(state, joined(NAMES[0], at=9.0))
    assert back.peers[NAMES[0]].gone_at is None and back.peers[NAMES[0]].since == 9.0
    assert apply_event(state, PeerDeparted(at=5.0, peer=NAMES[3], reason="")).peers == state.peers


def test_host_restart_is_not_logged_as_peers_leaving() -> None:
    state = apply_all([*opening_events(), HostRestarted(at=50.0)])
    assert not state.live and {peer.reason for peer in state.peers.values()} == {UNSEEN_SINCE_RESTART}
    seen = apply_all([joined(NAMES[0], at=51.0)], state)
    assert seen.log == state.log and NAMES[0] in seen.live
    assert len(apply_all([joined(NAMES[2], at=51.0)], state).log) == len(state.log) + 1


def test_lost_found_and_missing_rounds() -> None:
    state = apply_all([*opening_events(), SwarmLost(at=7.0)])
    assert state.lost_since == 7.0
    state = apply_all([SwarmFound(at=8.0), RoundsMissing(at=8.0, first=3, last=5)], state)
    assert state.lost_since is None and state.missing_rounds == 3


def test_log_timelines_and_departed_peers_are_bounded() -> None:
    crowd = [f"peer-{number}" for number in range(MAX_GONE_PEERS + 50)]
    events: list[LoggedEvent] = [*opening_events()]
    events += [joined(name) for name in crowd] + [PeerDeparted(at=1.0, peer=name, reason="expired") for name in crowd]
    events += [event for number in range(60) for event in (committed(number), timed(number))]
    state = apply_all(events)
    assert len(state.log) == MAX_LOG_LINES and len(state.timelines) == MAX_TIMELINES
    assert len(state.peers) == MAX_GONE_PEERS + 2
    assert len(state.peers[NAMES[0]].speeds) == MAX_SPEEDS


def test_history_is_complete_and_shares_old_chunks() -> None:
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
def test_any_order_of_events_is_accepted(seed: int) -> None:
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


def test_newest_time_includes_events_without_a_log_line() -> None:
    state = apply_all([*opening_events(), committed(0, at=1500.0)])
    assert state.newest_at == 1500.0 > max(line.at for line in state.log)
    assert apply_all([committed(1, at=None)], state).newest_at == 1500.0
