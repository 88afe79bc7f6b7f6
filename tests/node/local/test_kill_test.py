from node.local.kill_test import RESTART_AFTER_SECONDS, KillTest, KillTestAction
from node.local.swarm_summary import PeerProcessState, PeerSummary, SwarmSummary
from node.monitoring.status import NodeStatus


def peer(
    round_number: int,
    live: int = 3,
    included: int | None = None,
    state: PeerProcessState = "running",
    digest: str = "same",
) -> PeerSummary:
    status = NodeStatus(
        peer_id="p",
        run="d",
        run_id="0",
        round=round_number,
        peers=live,
        last_included_round=included,
        digest=digest,
    )
    return PeerSummary("peer", state, status)


def view(*peers: PeerSummary, elapsed: float = 0.0, target: int = 20) -> SwarmSummary:
    return SwarmSummary("d", target, None, elapsed, peers)


def act(drill: KillTest, *peers: PeerSummary, elapsed: float = 0.0, target: int = 20) -> str | None:
    order = drill.next_action(view(*peers, elapsed=elapsed, target=target))
    return order.action if order else None


def struck() -> KillTest:
    """A drill whose victim was killed in round 10."""
    drill = KillTest(3)
    assert act(drill, peer(10), peer(10), peer(10)) == "kill"
    return drill


def test_nothing_before_half() -> None:
    drill = KillTest(3)
    assert act(drill, peer(9), peer(9), peer(9)) is None
    assert (drill.lost_count, drill.rejoined_count) == (0, 0)


def test_kill_at_half_then_return_then_welcome() -> None:
    drill = KillTest(3)
    assert drill.next_action(view(peer(10), peer(10), peer(10))) == KillTestAction(
        "kill", "drill: peer is killed in round 10"
    )
    gone = peer(10, state="lost")
    assert act(drill, peer(10, 2), peer(10, 2), gone) is None
    assert act(drill, peer(11, 2), peer(11, 2), gone) == "start"
    assert (drill.lost_count, drill.rejoined_count) == (1, 0)
    assert act(drill, peer(12, 3), peer(12, 3), PeerSummary("peer", "starting", None)) is None
    assert act(drill, peer(13, 3), peer(13, 3), peer(13, 3, included=10)) is None  # that was in its first life
    assert act(drill, peer(16, 3), peer(16, 3), peer(14, 3, included=13)) is None  # still behind
    assert act(drill, peer(17, 3), peer(16, 3), peer(16, 3, included=15)) == "none"
    assert (drill.lost_count, drill.rejoined_count) == (1, 1)
    assert act(drill, peer(18), peer(18), peer(18)) is None


def test_rounds_of_its_own_are_no_return() -> None:
    """It missed the others' end and went to the target alone: the same number of rounds, another model."""
    drill, gone = struck(), peer(10, state="lost")
    assert act(drill, peer(11, 2), peer(11, 2), gone) == "start"
    others = (peer(20, state="ended"), peer(20, state="ended"))
    assert act(drill, *others, peer(20, 1, included=19, digest="other")) is None
    assert act(drill, *others, peer(19, 1, included=18)) is None
    assert drill.rejoined_count == 0
    assert act(drill, *others, peer(20, 3, included=19)) == "none"


def test_slowest_survivor_decides() -> None:
    drill, gone = struck(), peer(10, state="lost")
    assert act(drill, peer(12, 2), peer(10, 2), gone) is None


def test_more_rounds_where_the_loss_went_unnoticed() -> None:
    drill, gone = struck(), peer(10, state="lost")
    assert act(drill, peer(12), peer(12), gone) is None
    assert act(drill, peer(13), peer(13), gone) == "start"


def test_no_waiting_for_notice_when_few_rounds_are_left() -> None:
    drill = KillTest(3)
    assert act(drill, peer(3), peer(3), peer(3), target=6) == "kill"
    assert act(drill, peer(4), peer(4), peer(3, state="lost"), target=6) == "start"


def test_others_that_cannot_go_on_alone_get_it_back() -> None:
    drill, gone = struck(), peer(10, state="lost")
    assert act(drill, peer(10), peer(10), gone, elapsed=RESTART_AFTER_SECONDS) is None
    order = drill.next_action(view(peer(10), peer(10), gone, elapsed=RESTART_AFTER_SECONDS + 1))
    assert order == KillTestAction("start", "drill: the others wait; peer is started again")


def test_one_that_is_not_running_or_alone_is_not_killed() -> None:
    assert act(KillTest(2), peer(15), peer(15, state="lost")) is None
    assert act(KillTest(1), peer(15)) is None
