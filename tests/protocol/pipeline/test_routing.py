import random
from collections import Counter

from protocol.pipeline.routing import MAX_BAN_SECONDS, MAX_PROBES, Router, StagePeer, task_round

SPEEDS = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}


def make_router(speeds: dict[str, float] = SPEEDS) -> Router:
    router = Router(random.Random(1))
    router.update(StagePeer(peer, 1, 0, rate) for peer, rate in speeds.items())
    return router


def test_choices_are_proportional_to_the_reported_rate() -> None:
    router = make_router()
    chosen = Counter(router.choose(0.0) for _ in range(1500))
    assert [chosen[peer] for peer in "abcd"] == [100, 200, 400, 800]
    for _ in range(5):
        router.record_answer("d", 30.0)  # a long way to it changes nothing
    chosen = Counter(router.choose(0.0) for _ in range(1500))
    assert [chosen[peer] for peer in "abcd"] == [100, 200, 400, 800]
    router.record_rate("a", 9.0)
    chosen = Counter(router.choose(0.0) for _ in range(2300))
    assert abs(chosen["a"] - 900) < 20


def test_a_peer_has_at_most_a_second_of_work_and_what_is_on_its_way() -> None:
    router = make_router({"a": 2.0})
    router.record_answer("a", 0.25)
    taken = 0
    while (peer := router.choose(0.0)) is not None:
        router.begin(peer)
        taken += 1
    assert taken == 2 * 2 * 1.5 + 1
    router.end("a")
    assert router.choose(0.0) == "a"


def test_a_new_peer_enters_at_the_current_minimum() -> None:
    router = make_router({"a": 1.0})
    for _ in range(100):
        router.choose(0.0)
    router.update([StagePeer("a", 1, 0, 1.0), StagePeer("b", 1, 0, 1.0)])
    chosen = Counter(router.choose(0.0) for _ in range(20))
    assert abs(chosen["a"] - chosen["b"]) <= 2


def test_a_peer_that_was_busy_for_long_catches_up_with_two_seconds_of_work_only() -> None:
    router = make_router({"a": 10.0, "b": 10.0})
    router.record_busy("a", 0.0, 100.0)
    assert Counter(router.choose(0.0) for _ in range(500)) == {"b": 500}
    chosen = Counter(router.choose(101.0) for _ in range(100))
    assert 55 <= chosen["a"] <= 62


def test_an_unreachable_peer_is_passed_over_for_growing_pauses() -> None:
    router = make_router()
    now, pauses = 0.0, []
    for _ in range(9):
        until = router.record_failure("d", now)
        assert router.choose(now) != "d" and router.record_failure("d", now) == until
        pauses.append(until - now)
        now = until
    assert pauses[:4] == [5.0, 10.0, 20.0, 40.0] and pauses[-1] == MAX_BAN_SECONDS
    assert "d" in {router.choose(now) for _ in range(10)}
    router.record_answer("d", 0.1)
    assert router.record_failure("d", now) == now + 5.0


def test_bans_do_not_count_if_nobody_else_is_left() -> None:
    router = make_router()
    for peer in SPEEDS:
        router.record_failure(peer, 0.0)
    assert router.choose(0.0) in SPEEDS


SILENT = {f"silent {number}": 8.0 for number in range(50)}


def make_router_beside_silent_peers(*, answering: bool = False) -> Router:
    """Return a router of one peer that answers, and of fifty that announce to be faster and never do."""
    router = Router(random.Random(1))
    silent = [StagePeer(peer, 1, 0, rate, answers=answering) for peer, rate in SILENT.items()]
    router.update([StagePeer("honest", 1, 0, 4.0), *silent])
    return router


def test_peers_that_do_not_answer_get_probes_and_no_tasks() -> None:
    router, probes = make_router_beside_silent_peers(), Counter[str]()
    assert len(router.take_probes(0.0)) == MAX_PROBES and router.take_probes(0.0) == []
    router = make_router_beside_silent_peers()
    for now in range(600):
        assert router.choose(float(now)) == "honest"
        for peer in router.take_probes(float(now)):
            probes[peer] += 1
            router.record_probe(peer, answers=False, now=float(now))
    assert len(probes) == 50 and max(probes.values()) <= 8, "in growing pauses"
    assert make_router_beside_silent_peers(answering=True).choose(0.0) in SILENT, "the control"


def test_a_peer_gets_tasks_once_it_has_answered_a_probe_until_it_is_silent() -> None:
    router = Router(random.Random(1))
    router.update([StagePeer("old", 1, 0, 1.0), StagePeer("new", 1, 0, 1.0, answers=False)])
    assert router.take_probes(0.0) == ["new"] and router.choose(0.0) == "old"
    router.record_probe("new", answers=True, now=0.1)
    assert {router.choose(0.1) for _ in range(4)} == {"old", "new"}
    assert router.record_silence("new", 1.0) == 6.0 and router.probe_time(1.0) == 6.0 and not router.take_probes(5.9)
    assert router.take_probes(6.0) == ["new"] and {router.choose(6.0) for _ in range(4)} == {"old"}
    router.record_probe("new", answers=True, now=6.1)
    assert router.record_silence("new", 7.0) == 17.0, "an answer to a probe does not shorten the pause"
    router.update([StagePeer("old", 1, 0, 1.0), StagePeer("new", 1, 0, 1.0)])
    assert {router.choose(17.0) for _ in range(16)} == {"old", "new"}, "it has answered another call"


def test_silent_peers_are_asked_where_nobody_answers() -> None:
    router = Router(random.Random(1))
    router.update([StagePeer("a", 1, 0, answers=False), StagePeer("b", 1, 0, answers=False)])
    assert router.take_probes(0.0) == [] and {router.choose(0.0) for _ in range(4)} == {"a", "b"}
    router.record_answer("a", 0.1)
    assert router.take_probes(0.1) == ["b"] and {router.choose(0.1) for _ in range(4)} == {"a"}


def test_tasks_are_of_our_round_unless_all_of_the_stage_is_far_from_it() -> None:
    """Servers refuse tasks of a round far from their own, and so would those of a stage that lost some rounds."""

    def asked(*rounds: int) -> int:
        return task_round(30, [StagePeer(str(number), 1, number) for number in rounds])

    assert (asked(), asked(31), asked(29, 10)) == (30, 30, 30)
    assert (asked(10), asked(10, 12), asked(60)) == (10, 12, 60)
    assert asked(29, 2**24) == 30, "one that lies changes nothing while another one is near"


def test_a_busy_peer_wakes_those_that_wait() -> None:
    router = make_router({"a": 1.0})
    assert router.wake_time(0.0) is None
    router.record_busy("a", 0.0, 3.0)
    assert router.choose(2.9) is None and router.wake_time(2.9) == 3.0 and router.choose(3.0) == "a"


def test_a_busy_peer_that_has_room_again_is_chosen_before_its_pause_ends() -> None:
    router = make_router({"a": 1.0})
    router.record_busy("a", 0.0, 3.0)
    router.record_invitation("a", 1.0)
    assert router.choose(1.0) == "a"


def test_a_busy_answer_that_an_invitation_has_overtaken_does_not_count() -> None:
    router = make_router({"a": 1.0})
    router.record_invitation("a", 1.0)
    router.record_busy("a", 0.5, 3.0)
    assert router.choose(1.1) == "a"
    router.record_busy("a", 1.1, 3.0)
    assert router.choose(1.2) is None


def test_a_stage_that_nobody_serves_is_reported_at_once_and_then_every_ten_seconds() -> None:
    router = make_router({})
    assert [time for time in range(25) if router.reports_emptiness(time)] == [0, 10, 20]
    router.update([StagePeer("a", 1, 0)])
    assert not router.reports_emptiness(40.0)
    router.update([])
    assert router.reports_emptiness(41.0)
    router.update([StagePeer("a", 1, 0)])
    router.remove("a")
    assert not router.reports_emptiness(42.0), "a peer that takes no work enters with each of its records"


def test_a_peer_that_leaves_gets_nothing_and_keeps_its_count() -> None:
    router = make_router({"a": 1.0, "b": 1.0})
    router.begin("a")
    router.update([StagePeer("a", 1, 0, draining=True), StagePeer("b", 1, 0)])
    assert {router.choose(0.0) for _ in range(5)} == {"b"} and router.expected_seconds("a") == 2.0
    router.update([])
    assert router.choose(0.0) is None
    router.end("a")
    assert router.expected_seconds("a") == 0.0


def test_a_hidden_peer_is_chosen_beside_another_only_where_there_is_no_other() -> None:
    router = Router(random.Random(1))
    hidden, open_one = StagePeer("a", 1, 0, 9.0, hidden=True), StagePeer("b", 1, 0, 1.0)
    router.update([hidden, open_one])
    assert router.choose(0.0) == "a"
    assert [router.choose(0.0, (), beside_hidden=True) for _ in range(3)] == ["b", "b", "b"]
    router.record_busy("b", 0.0, 1.0)
    assert router.choose(0.0, (), beside_hidden=True) is None, "it is worth waiting for"
    router.update([hidden])
    assert router.choose(0.0, (), beside_hidden=True) == "a"
