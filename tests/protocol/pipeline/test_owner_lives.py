"""Lives of servers, as their owners see them: of two stages at one peer, and of a peer that only seemed gone."""

import random
from collections.abc import Iterable

from protocol.pipeline.messages import HeldBlob, Key, Outcome
from protocol.pipeline.microbatch import OwnerSettings
from protocol.pipeline.owner import Owner
from protocol.pipeline.owner_events import Action, Ask, OutcomeReceived, PeersChanged, Release
from protocol.pipeline.routing import StagePeer
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, TOKENS, blob_of, run_id

KEY = Key("me", 1)


def asked(actions: Iterable[Action]) -> Ask:
    return next(action for action in actions if isinstance(action, Ask))


def listed(*lives: int) -> PeersChanged:
    """The peer at each stage, by the lives of its processes."""
    return PeersChanged(tuple((StagePeer("both", life, 0, 1.0),) for life in lives), 0)


def done(ask: Ask, result: str = "") -> OutcomeReceived:
    task = ask.task
    blob = blob_of(KEY, result, ACTIVATION) if result else None
    added = task.direction == "backward"
    return OutcomeReceived(
        "both", Outcome(task.run, 1, task.direction, task.attempt, task.life, "done", blob, added, loss=1.0)
    )


def test_each_stage_of_a_peer_is_asked_with_its_own_life() -> None:
    owner = Owner(OwnerSettings("me", 1), [run_id(0), run_id(1)], random.Random(1))
    owner.handle(listed(5, 3), 0.0)
    first = asked(owner.begin(1, HeldBlob(blob_of(KEY, "tokens", TOKENS), "me"), 0.0))
    second = asked(owner.handle(done(first, "forward 0"), 1.0))
    assert (first.task.life, second.task.life) == (5, 3)
    assert (second.task.run, second.peer) == (run_id(1), "both")
    third = asked(owner.handle(done(second), 2.0))
    assert (third.task.direction, third.task.life) == ("backward", 3)
    fourth = asked(owner.handle(done(third, "backward 1"), 3.0))
    owner.handle(listed(6, 3), 3.5)
    assert owner._microbatches[1].lost == set(), "the process of the other stage died"
    owner.handle(listed(6, 4), 3.6)
    assert owner._microbatches[1].lost == {1}, "the control"
    assert fourth.task.life == 5


def test_server_that_seemed_gone_hears_which_microbatches_have_ended() -> None:
    servers = tuple((StagePeer(name, 1, 0, 1.0),) for name in ("slow", "last"))
    owner = Owner(OwnerSettings("me", 1), [run_id(0), run_id(1)], random.Random(1))
    owner.handle(PeersChanged(servers, 0), 0.0)
    asked(owner.begin(1, HeldBlob(blob_of(KEY, "tokens", TOKENS), "me"), 0.0))
    owner.handle(PeersChanged(((), servers[1]), 0), 1.0)
    owner.leave(2.0)
    assert not releases(owner.advance(9.0)), "it cannot be told now"
    owner.handle(PeersChanged(servers, 0), 10.0)
    assert releases(owner.advance(11.0)) == [Release("slow", 0, frozenset({1}))]
    assert not releases(owner.advance(20.0)), "once is enough"


def releases(actions: Iterable[Action]) -> list[Release]:
    return [action for action in actions if isinstance(action, Release)]
