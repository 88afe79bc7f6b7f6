"""Several events of one kind are one line of the log."""

from node.dashboard.event_log import EventLog
from node.dashboard.events import LoggedEvent, PeerDeparted
from node.dashboard.state import RunState
from tests.node.dashboard.example_events import NAMES, OPENED, apply_all, committed, joined

ADA, BOB, MARY, EVE = NAMES


def people() -> list[LoggedEvent]:
    return [OPENED, *(joined(peer, name=name) for peer, name in zip(NAMES, ("ada", "bob", "mary", ""), strict=True))]


def texts(state: RunState) -> list[str]:
    return [line.text for line in state.log[4:]]


def left(peer: str, at: float, reason: str = "expired") -> PeerDeparted:
    return PeerDeparted(at=at, peer=peer, reason=reason)


def test_rounds_without_the_same_peer_are_one_line() -> None:
    rounds = [committed(number, late=[MARY]) for number in range(170, 176)]
    assert texts(apply_all([*people(), *rounds])) == ["rounds 170 to 175 without mary: not in time"]
    assert texts(apply_all([*people(), rounds[0]])) == ["round 170 without mary: not in time"]


def test_rounds_in_between_with_the_peer_are_counted() -> None:
    rounds = [committed(number, late=[MARY] if number % 2 else []) for number in range(1, 8)]
    assert texts(apply_all([*people(), *rounds])) == ["4 of rounds 1 to 7 without mary: not in time"]


def test_other_peers_or_a_long_gap_begin_another_line() -> None:
    rounds = [committed(1, late=[MARY]), committed(2, late=[BOB, MARY]), committed(3, late=[MARY])]
    assert texts(apply_all([*people(), *rounds])) == [
        "round 2 without bob, mary: not in time" if BOB < MARY else "round 2 without mary, bob: not in time",
        "2 of rounds 1 to 3 without mary: not in time",
    ]
    assert len(texts(apply_all([*people(), committed(1, late=[MARY]), committed(30, late=[MARY])]))) == 2


def test_absences_of_one_peer_are_one_line() -> None:
    events: list[LoggedEvent] = [*people()]
    expected: list[tuple[LoggedEvent, str]] = [
        (left(MARY, 1000.0), "mary is silent and counts as gone"),
        (joined(MARY, at=1020.0, name="mary"), "mary is back after 20 s"),
        (left(MARY, 1100.0), "mary is silent and counts as gone; 2 absences in 1 min 40 s"),
        (joined(MARY, at=1120.0, name="mary"), "mary is back after 20 s; 2 absences in 2 min"),
    ]
    for event, text in expected:
        events.append(event)
        assert texts(apply_all(events)) == [text]
    events.append(left(EVE, 1130.0, "left"))  # control: another peer has its own line
    assert texts(apply_all(events)) == [expected[-1][1], f"..{EVE[-6:]} left"]
    assert len(texts(apply_all([*events, left(MARY, 9000.0)]))) == 3, "long after"


def test_saying_goodbye_is_no_warning() -> None:
    state = apply_all([*people(), left(MARY, 1000.0, "left"), left(BOB, 1000.0)])
    assert [line.tone for line in state.log[-2:]] == ["busy", "warn"]


def test_grown_line_keeps_its_id_and_is_sent_again() -> None:
    event_log = EventLog(None, [*people(), committed(0, late=[MARY])])
    first = event_log.state.log[-1]
    event_log.record(joined("12D3KooWother", name="zoe"))
    event_log.record(committed(1, late=[MARY]))
    event_log.record(committed(2))
    lines = event_log.state.log
    assert [line.text for line in lines[-2:]] == ["zoe joined, trains", "rounds 0 to 1 without mary: not in time"]
    assert (lines[-1].id, lines[-1].index) == (first.id, event_log.state.index - 2)
    messages = event_log.messages_since(first.index)
    assert messages is not None
    sent = [b'"line":{"id":%d,' % first.id in message for message in messages]
    assert sent == [True, False, True, False]


def test_peers_of_the_same_name_are_told_apart() -> None:
    twins = [joined(peer, name="mary") for peer in (ADA, BOB)]
    state = apply_all([OPENED, *twins, left(BOB, 1001.0)])
    assert [line.text for line in state.log] == [
        "mary joined, trains",
        f"mary (..{BOB[-6:]}) joined, trains",
        f"mary (..{BOB[-6:]}) is silent and counts as gone",
    ]
