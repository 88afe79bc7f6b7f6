"""Servers that do not answer: whom the node takes for one, and what its owner hears of them."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from node.daemon.stages import calls
from node.daemon.stages.calls import StageCalls
from node.daemon.stages.stage_effects import StageEffects
from node.loop.stage_events import StageEvent
from protocol.errors import LimitError, UnreachableError
from protocol.murmur_pb2 import ReleaseReply
from protocol.pipeline.messages import Inputs, Task
from protocol.pipeline.owner_events import AskFailed, Probe, Probed
from tests.node.daemon.stages.attacked_stage import AttackedStage

SERVER, RUN = "a server", "aa" * 32
TASK = Task(RUN, "me", 1, "forward", 1, 0, 0, Inputs(), 1000)


class Channels:
    def open_direct(self, peer: str) -> None:
        pass


async def test_node_knows_which_peers_answered_its_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    is_silent, calls_of_node = False, StageCalls(cast(Any, Channels()))

    async def call(*_: object) -> ReleaseReply:
        if is_silent:
            raise UnreachableError("it does not answer")
        return ReleaseReply()

    monkeypatch.setattr(calls, "call_by_best_channel", call)
    await calls_of_node.release(SERVER, RUN, ())
    assert list(calls_of_node.answering) == [SERVER]
    is_silent = True
    with pytest.raises(UnreachableError):
        await calls_of_node.release(SERVER, RUN, ())
    assert not calls_of_node.answering


@pytest.mark.parametrize(
    ("error", "answers"), [(None, True), (UnreachableError("silent"), False), (LimitError("refused"), False)]
)
async def test_probe_is_an_empty_release_and_failed_asks_leave_the_microbatch_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, answers: bool
) -> None:
    stage, events = AttackedStage(tmp_path), list[StageEvent]()
    released = list[frozenset[int]]()

    async def call(peer: str, *arguments: Any) -> None:
        released.append(arguments[-1])
        if error is not None:
            raise error

    monkeypatch.setattr(stage.node, "send_release", call)
    monkeypatch.setattr(stage.node, "ask", call)
    monkeypatch.setattr(StageEffects, "post", lambda self, event: events.append(event))
    stage.stage._run(Probe(SERVER, 0))
    await asyncio.sleep(0.01)
    assert events == [Probed(SERVER, 0, answers)] and released == [frozenset()]
    if error is not None:
        await stage.stage._ask(SERVER, TASK)
        assert events[-1] == AskFailed(SERVER, TASK, unreachable=True), "another server may have it"
