"""The JSON views of a state."""

import json

import pytest

from node.dashboard.events import (
    ChainForked,
    HostRestarted,
    LoggedEvent,
    PeerDeparted,
    PeersUpdated,
    RunSteered,
    ScoresMeasured,
    SwarmLost,
    ValidationMeasured,
)
from node.dashboard.html_page import render_page
from node.dashboard.json_views import SERIES, history, run_status, series_points, snapshot, summary, thin_out
from node.dashboard.server import SwarmCollector
from node.dashboard.state import RunState
from tests.node.dashboard.example_events import (
    FACTS,
    NAMES,
    OPENED,
    apply_all,
    committed,
    joined,
    opening_events,
    peer_report,
    timed,
)

RUN = [*opening_events(), *map(committed, range(10)), timed(4), timed(8)]


def test_summary_has_the_documented_fields() -> None:
    values = snapshot(apply_all(RUN), 1100.0)
    assert values["run"] == "small" and values["round"] == 10 and values["tokens"] == 2000
    assert values["loss"] == 3.0 and isinstance(values["peers"], list) and len(values["peers"]) == 2
    assert values["saved"] == pytest.approx(40.0) and values["round_seconds"] == 2.0
    assert values["seconds_left"] == 90 * 2.0 and values["progress"] == 0.1
    assert values["timeline"]["round"] == 8 and values["timelines"] == [4, 8]
    json.dumps(values, allow_nan=False)


def test_empty_state_has_a_summary() -> None:
    values = snapshot(RunState(), 5.0)
    assert values["round"] == 0 and values["loss"] is None and values["status"] == "waiting"


def test_run_status_words() -> None:
    assert run_status(apply_all([OPENED]))[::2] == ("waiting", "no peers yet")
    assert run_status(apply_all(opening_events()[:2]))[::2] == ("waiting", "1 of 2 peers are here")
    assert run_status(apply_all(opening_events()))[0] == "warming up"
    assert run_status(apply_all(RUN))[0] == "training"
    assert run_status(apply_all([*RUN, HostRestarted(at=1.0)]))[0] == "looking"
    assert run_status(apply_all([*RUN, SwarmLost(at=1.0)]))[0] == "out of sight"
    assert run_status(apply_all([*opening_events(), *map(committed, range(100)), SwarmLost(at=1.0)]))[0] == "done"


def test_run_whose_peers_all_said_goodbye_is_not_out_of_sight() -> None:
    goodbyes = [PeerDeparted(at=1.0, peer=name, reason="left") for name in NAMES[:2]]
    state = apply_all([*RUN, *goodbyes])
    assert run_status(state)[:2] == ("empty", "busy")
    assert {peer["tone"] for peer in snapshot(state, 1.0)["peers"]} == {"busy"}
    silent = apply_all([*RUN, goodbyes[0], PeerDeparted(at=1.0, peer=NAMES[1], reason="expired"), SwarmLost(at=2.0)])
    assert run_status(silent)[:2] == ("out of sight", "bad")  # control
    assert words(silent) == {NAMES[0]: "left", NAMES[1]: "gone"}
    crashed_before: list[LoggedEvent] = [joined(NAMES[2]), PeerDeparted(at=0.5, peer=NAMES[2], reason="expired")]
    assert run_status(apply_all([*RUN, *crashed_before, *goodbyes]))[0] == "empty"


def words(state: RunState) -> dict[str, str]:
    return {peer["peer"]: peer["state"] for peer in snapshot(state, 1.0)["peers"]}


def test_peer_status_words() -> None:
    at_head = PeersUpdated(at=1.0, peers=tuple(peer_report(name, round=10) for name in NAMES[:2]))
    events = [*RUN, at_head, joined(NAMES[2], round=0), joined(NAMES[3], role="observer")]
    assert list(words(apply_all(events)).values()) == ["training", "training", "joining", "watching"]
    late = apply_all(
        [*events, committed(10, NAMES[:1], late=[NAMES[1]]), PeerDeparted(at=1.0, peer=NAMES[2], reason="left")]
    )
    assert words(late)[NAMES[1]] == "late" and words(late)[NAMES[2]] == "left"
    resting = apply_all([*events, PeersUpdated(at=2.0, peers=(peer_report(NAMES[1], round=10, resting=True),))])
    assert words(resting)[NAMES[1]] == "resting"
    behind = apply_all([*events, *(committed(number, NAMES[:1]) for number in range(10, 14))])
    assert words(behind)[NAMES[1]] == "behind" and words(behind)[NAMES[0]] == "training"


def test_paused_run_looks_paused() -> None:
    """No time left, and no peer that trains. Control: the run before the pause, and after it."""
    at_head = PeersUpdated(at=1.0, peers=tuple(peer_report(name, round=10) for name in NAMES[:2]))
    going_on = apply_all([*RUN, at_head])
    paused, resumed = (RunSteered(at=2.0, facts=FACTS, revisions=(), is_paused=word) for word in (True, False))
    for state, expected in ((going_on, "training"), (apply_all([paused], going_on), "paused")):
        values = summary(state, 3.0)
        assert values["status"] == expected and set(words(state).values()) == {expected}
        assert (values["seconds_left"] is None) == (values["tokens_per_second"] == 0) == (expected == "paused")
    assert set(words(apply_all([paused, resumed], going_on)).values()) == {"training"}


def test_peer_whose_trainer_starts_is_not_called_ready() -> None:
    here = PeersUpdated(at=1.0, peers=(peer_report(NAMES[1], resting=True),))
    state = apply_all([*opening_events(), here])
    assert run_status(state)[::2] == ("waiting", "2 peers are here, 1 of them ready to train")
    assert words(state)[NAMES[1]] == "starting"


def test_resting_peer_is_counted_and_adds_no_throughput() -> None:
    at_head = tuple(peer_report(name, round=10) for name in NAMES[:3])
    working = apply_all(
        [*RUN, joined(NAMES[2]), joined(NAMES[3], role="observer"), PeersUpdated(at=1.0, peers=at_head)]
    )
    assert summary(working, 1.0)["tokens_per_second"] == 150.0
    resting = apply_all([PeersUpdated(at=2.0, peers=(peer_report(NAMES[1], round=10, resting=True),))], working)
    assert summary(resting, 1.0)["tokens_per_second"] == 100.0
    families = {family.name: family for family in SwarmCollector(lambda: snapshot(resting, 1.0)).collect()}
    counts = {sample.labels["state"]: sample.value for sample in families["murmur_swarm_peers"].samples}
    assert counts["resting"] == 1 and sum(counts.values()) == len(resting.live) == 4


def test_link_names_the_relay_and_the_relayed_peers() -> None:
    relay, hidden = NAMES[0], NAMES[1]
    by = (relay, "<b>nobody</b>")
    state = apply_all([OPENED, joined(relay, reach="direct"), joined(hidden, reach="relay", carriers=by)])
    links = {peer["peer"]: peer["link"] for peer in snapshot(state, 1.0)["peers"]}
    assert links == {relay: "direct, relays to 1", hidden: f"relay by ..{relay[-6:]}"}
    state = apply_all([PeerDeparted(at=1050.0, peer=hidden, reason="left")], state)
    assert snapshot(state, 1.0)["peers"][0]["link"] == "direct"
    state = apply_all([OPENED, joined(relay, reach="direct", carried=2_100_000)])
    assert snapshot(state, 1.0)["peers"][0]["link"] == "direct, relayed 2.1 MB for others"


def test_left_today_ignores_the_restart_of_the_host() -> None:
    gone = apply_all([*RUN, PeerDeparted(at=1050.0, peer=NAMES[0], reason="left")])
    assert summary(gone, 1100.0)["left_today"] == 1 and summary(gone, 1100.0 + 90_000)["left_today"] == 0
    assert summary(apply_all([*RUN, HostRestarted(at=1100.0)]), 1101.0)["left_today"] == 0


def test_seconds_left_follow_from_the_token_target() -> None:
    facts = FACTS.model_copy(update={"target_rounds": None, "target_tokens": 4000})
    events = [OPENED.model_copy(update={"facts": facts}), *RUN[1:]]
    assert summary(apply_all(events), 1.0)["seconds_left"] == pytest.approx(2000 / 200 * 2.0)
    assert summary(apply_all(events), 1.0)["progress"] == 0.5


def test_validation_of_a_mixture_has_a_loss_for_each_source() -> None:
    losses = {"code": 1.5, "books": 2.5}
    state = apply_all([*RUN, ValidationMeasured(at=1.0, peer=NAMES[0], round=9, loss=2.0, by_source=losses)])
    assert summary(state, 1.0)["validation_by_source"] == losses and summary(state, 1.0)["validation"] == 2.0
    assert summary(apply_all(RUN), 1.0)["validation_by_source"] == {}


def test_page_says_that_the_loss_of_scores_is_the_entropy_of_answers() -> None:
    scored = [*RUN, ScoresMeasured(at=1.0, round=8, reward=0.25)]
    assert summary(apply_all(RUN), 1.0)["reward"] is None
    assert summary(apply_all(scored), 1.0)["reward"] == 0.25, "the scores of the newest round follow its commit"
    later = [*scored, committed(10), committed(11)]
    assert summary(apply_all(later), 1.0)["reward"] is None
    for events, words in ((RUN, "of the peers&#x27; own weights"), (scored, "the entropy of answers")):
        assert words in render_page(snapshot(apply_all(events), 1.0), None, "0")


def test_history_is_complete_and_thinned_on_request() -> None:
    state = apply_all([*RUN, ValidationMeasured(at=1.0, peer=NAMES[0], round=3, loss=2.0)])
    columns = history(state, 100)
    assert set(columns) == set(SERIES) and columns["round"] == list(range(10))
    assert columns["sent"][4] == 1000 and columns["sent"][5] is None and columns["validation"][2] == 2.0
    assert series_points(state, "sent", 100) == [(4, 1000), (8, 1000)]
    assert [row.round for row in apply_all([ChainForked(at=1.0, round=4)], state).rows] == [0, 1, 2, 3]


@pytest.mark.parametrize(("count", "maximum"), [(10, 3), (10, 10), (11, 10), (1000, 7), (5, 100), (0, 2), (2001, 2000)])
def test_thinning_keeps_first_and_last_within_the_limit(count: int, maximum: int) -> None:
    found = thin_out(range(count), maximum)
    assert len(found) <= maximum and found == sorted(set(found))
    assert not count or (found[0] == 0 and found[-1] == count - 1)
