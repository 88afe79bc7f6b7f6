"""The event log's messages to subscribers."""

import asyncio
import json
from pathlib import Path

import pytest

from node.dashboard import event_log as module
from node.dashboard.event_log import MAX_QUEUED_MESSAGES, EventLog, stream_messages
from node.dashboard.events import PeersUpdated
from node.dashboard.state import RunState
from protocol.errors import LimitError
from tests.node.dashboard.example_events import NAMES, OPENED, apply_all, committed, joined, opening_events, peer_report


def indices(found: list[bytes] | None) -> list[int] | None:
    return None if found is None else [int(message.split(b"\n")[0][4:]) for message in found]


def test_restart_continues_the_event_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventLog.open(path, OPENED)
    for event in [*opening_events()[1:], committed(0)]:
        first.record(event)
    first.record(PeersUpdated(at=1.0, peers=(peer_report(NAMES[0], round=9),)))
    first.close()
    again = EventLog.open(path, OPENED.model_copy(update={"at": 2000.0}))
    assert again.state.index == first.state.index + 1
    assert [row.round for row in again.state.rows] == [0] and not again.state.live
    again.close()


def test_reconnected_subscriber_gets_exactly_the_missed_messages() -> None:
    event_log = EventLog(None, [*opening_events(), *map(committed, range(5))])
    assert indices(event_log.messages_since(5)) == [5, 6, 7]
    assert indices(event_log.messages_since(8)) == []
    assert event_log.messages_since(9) is None and event_log.messages_since(-1) is None


def test_messages_no_longer_kept_are_not_sent_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [*opening_events(), *map(committed, range(5))]
    for limit, value in (
        ("MAX_KEPT_MESSAGES", 4),
        ("MAX_KEPT_BYTES", sum(map(len, EventLog(None, events).messages_since(4) or []))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, value)
            event_log = EventLog(None, events)
        assert indices(event_log.messages_since(4)) == [4, 5, 6, 7] and event_log.messages_since(3) is None


async def test_subscribers_get_every_event_with_its_log_text() -> None:
    event_log = EventLog(None, opening_events())
    with event_log.subscribe() as subscriber:
        event_log.record(joined(NAMES[2], name="ada"))
        event_log.broadcast("now", {"round": 1})
        stream = stream_messages(subscriber, 5.0)
        event, moment = (await anext(stream)).decode(), (await anext(stream)).decode()
    assert event.startswith("id: 3\nevent: joined\ndata: ") and event.endswith("\n\n")
    assert json.loads(event.split("data: ")[1])["line"]["text"] == "ada joined, trains"
    assert moment == 'event: now\ndata: {"round":1}\n\n'
    assert event_log.subscriber_count == 0


async def test_slow_subscriber_is_disconnected_and_others_are_not() -> None:
    """Control: the subscriber that reads gets everything."""
    event_log = EventLog(None, opening_events())
    with event_log.subscribe() as slow, event_log.subscribe() as quick:
        for number in range(MAX_QUEUED_MESSAGES + 10):
            event_log.record(committed(number))
            assert quick.queue.get_nowait()
        assert event_log.subscriber_count == 1 and slow.has_overflowed and not quick.has_overflowed
        messages = [message async for message in stream_messages(slow, 0.01)]
    assert len(messages) == MAX_QUEUED_MESSAGES


async def test_idle_stream_sends_keepalive_comments() -> None:
    with EventLog(None).subscribe() as subscriber:
        async with asyncio.timeout(5):
            assert (await anext(stream_messages(subscriber, 0.01))).startswith(b":")


def test_number_of_subscribers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUBSCRIBERS", 1)
    event_log = EventLog(None)
    with event_log.subscribe(), pytest.raises(LimitError), event_log.subscribe():
        pass


def test_event_log_applies_events_as_the_state_does() -> None:
    assert EventLog(None, opening_events()).state == apply_all(opening_events(), RunState())
