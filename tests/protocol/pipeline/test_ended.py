"""An owner counts the gradients that die with a server: those that it cannot have contributed yet."""

from protocol.pipeline.microbatch import REMEMBERED, UNSAFE_ROUNDS, EndedMicrobatches, ServerLife
from protocol.pipeline.routing import StagePeer


def test_gradients_die_with_their_server_once() -> None:
    ended = EndedMicrobatches()
    assert ended.update([[StagePeer("a", 1, 0), StagePeer("b", 1, 0)]]) == 0
    for serial in range(3):
        ended.add(serial, {0: ServerLife("a", 1), 1: ServerLife("b", 1)}, lost={1})
    assert ended.update([[StagePeer("b", 1, 0)]]) == 3, "those at b were counted when their microbatch ended"
    assert ended.update([[]]) == 0


def test_gradients_of_an_earlier_life_are_lost() -> None:
    ended = EndedMicrobatches()
    ended.update([[StagePeer("a", 1, 0)]])
    ended.add(0, {0: ServerLife("a", 1)}, lost=())
    ended.add(1, {0: ServerLife("a", 2)}, lost=())  # the owner learned of the new life before the record came
    assert ended.update([[StagePeer("a", 2, 0)]]) == 1


def test_contributed_gradients_are_safe() -> None:
    ended = EndedMicrobatches()
    ended.update([[StagePeer("a", 1, 4)]])
    ended.add(0, {0: ServerLife("a", 1)}, lost=())
    ended.update([[StagePeer("a", 1, 4 + UNSAFE_ROUNDS - 1)]])
    ended.add(1, {0: ServerLife("a", 1)}, lost=())
    ended.update([[StagePeer("a", 1, 4 + UNSAFE_ROUNDS)]])
    assert ended.update([[]]) == 1


def test_late_outcomes_are_compared_with_a_bounded_number_of_microbatches() -> None:
    ended = EndedMicrobatches()
    for serial in range(REMEMBERED + 1):
        ended.add(serial, {0: ServerLife("a", 1)}, lost=())
    assert not ended.servers(0) and ended.servers(REMEMBERED)[0].peer == "a"
