"""Events in, messages out."""

import asyncio
import json
from pathlib import Path

import pytest

from node.host import recorder as module
from node.host.events import Moved
from node.host.recorder import MAX_BEHIND, Recorder, messages
from node.host.state import State
from protocol.errors import LimitError
from tests.node.host.story import NAMES, OPENED, beginning, committed, folded, joined, now_of


def indices(found: list[bytes] | None) -> list[int] | None:
    return None if found is None else [int(message.split(b"\n")[0][4:]) for message in found]


def test_a_restart_goes_on_with_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = Recorder.at(path, OPENED)
    for event in [*beginning()[1:], committed(0)]:
        first.record(event)
    first.record(Moved(at=1.0, peers=(now_of(NAMES[0], round=9),)))
    first.close()
    again = Recorder.at(path, OPENED.model_copy(update={"at": 2000.0}))
    assert again.state.index == first.state.index + 1
    assert [row.round for row in again.state.rows] == [0] and not again.state.live
    again.close()


def test_who_comes_again_gets_exactly_what_it_missed() -> None:
    recorder = Recorder(None, [*beginning(), *map(committed, range(5))])
    assert indices(recorder.since(5)) == [5, 6, 7]
    assert indices(recorder.since(8)) == []
    assert recorder.since(9) is None and recorder.since(-1) is None


def test_what_is_no_longer_kept_is_not_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [*beginning(), *map(committed, range(5))]
    for limit, value in (("KEPT_MESSAGES", 4), ("KEPT_BYTES", sum(map(len, Recorder(None, events).since(4) or [])))):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, value)
            recorder = Recorder(None, events)
        assert indices(recorder.since(4)) == [4, 5, 6, 7] and recorder.since(3) is None


async def test_listeners_hear_every_event_with_its_words() -> None:
    recorder = Recorder(None, beginning())
    with recorder.listen() as listener:
        recorder.record(joined(NAMES[2], name="ada"))
        recorder.tell("now", {"round": 1})
        stream = messages(listener, 5.0)
        event, moment = (await anext(stream)).decode(), (await anext(stream)).decode()
    assert event.startswith("id: 3\nevent: joined\ndata: ") and event.endswith("\n\n")
    assert json.loads(event.split("data: ")[1])["text"].endswith(" ada joined, trains")
    assert moment == 'event: now\ndata: {"round":1}\n\n'
    assert recorder.listeners == 0


async def test_a_slow_listener_is_cut_off_and_the_others_are_not() -> None:
    """The control: the quick one, which reads, gets everything."""
    recorder = Recorder(None, beginning())
    with recorder.listen() as slow, recorder.listen() as quick:
        for number in range(MAX_BEHIND + 10):
            recorder.record(committed(number))
            assert quick.queue.get_nowait()
        assert recorder.listeners == 1 and slow.overflowed and not quick.overflowed
        told = [message async for message in messages(slow, 0.01)]
    assert len(told) == MAX_BEHIND


async def test_a_quiet_stream_shows_that_it_lives() -> None:
    with Recorder(None).listen() as listener:
        async with asyncio.timeout(5):
            assert (await anext(messages(listener, 0.01))).startswith(b":")


def test_there_is_an_end_to_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTENERS", 1)
    recorder = Recorder(None)
    with recorder.listen(), pytest.raises(LimitError), recorder.listen():
        pass


def test_a_recorder_folds_as_the_state_does() -> None:
    assert Recorder(None, beginning()).state == folded(beginning(), State())
