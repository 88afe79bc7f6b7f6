"""Events in, messages out."""

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


def test_a_restart_goes_on_with_the_journal(tmp_path: Path) -> None:
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


def test_who_comes_again_gets_exactly_what_it_missed() -> None:
    recorder = EventLog(None, [*opening_events(), *map(committed, range(5))])
    assert indices(recorder.messages_since(5)) == [5, 6, 7]
    assert indices(recorder.messages_since(8)) == []
    assert recorder.messages_since(9) is None and recorder.messages_since(-1) is None


def test_what_is_no_longer_kept_is_not_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [*opening_events(), *map(committed, range(5))]
    for limit, value in (
        ("MAX_KEPT_MESSAGES", 4),
        ("MAX_KEPT_BYTES", sum(map(len, EventLog(None, events).messages_since(4) or []))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, value)
            recorder = EventLog(None, events)
        assert indices(recorder.messages_since(4)) == [4, 5, 6, 7] and recorder.messages_since(3) is None


async def test_listeners_hear_every_event_with_its_words() -> None:
    recorder = EventLog(None, opening_events())
    with recorder.subscribe() as listener:
        recorder.record(joined(NAMES[2], name="ada"))
        recorder.broadcast("now", {"round": 1})
        stream = stream_messages(listener, 5.0)
        event, moment = (await anext(stream)).decode(), (await anext(stream)).decode()
    assert event.startswith("id: 3\nevent: joined\ndata: ") and event.endswith("\n\n")
    assert json.loads(event.split("data: ")[1])["text"].endswith(" ada joined, trains")
    assert moment == 'event: now\ndata: {"round":1}\n\n'
    assert recorder.subscriber_count == 0


async def test_a_slow_listener_is_cut_off_and_the_others_are_not() -> None:
    """The control: the quick one, which reads, gets everything."""
    recorder = EventLog(None, opening_events())
    with recorder.subscribe() as slow, recorder.subscribe() as quick:
        for number in range(MAX_QUEUED_MESSAGES + 10):
            recorder.record(committed(number))
            assert quick.queue.get_nowait()
        assert recorder.subscriber_count == 1 and slow.has_overflowed and not quick.has_overflowed
        told = [message async for message in stream_messages(slow, 0.01)]
    assert len(told) == MAX_QUEUED_MESSAGES


async def test_a_quiet_stream_shows_that_it_lives() -> None:
    with EventLog(None).subscribe() as listener:
        async with asyncio.timeout(5):
            assert (await anext(stream_messages(listener, 0.01))).startswith(b":")


def test_there_is_an_end_to_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUBSCRIBERS", 1)
    recorder = EventLog(None)
    with recorder.subscribe(), pytest.raises(LimitError), recorder.subscribe():
        pass


def test_a_recorder_folds_as_the_state_does() -> None:
    assert EventLog(None, opening_events()).state == apply_all(opening_events(), RunState())
