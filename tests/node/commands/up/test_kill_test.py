from node.commands.up.local_swarm import RESTART_AFTER_SECONDS, KillTest, KillTestAction
from node.commands.up.swarm_summary import PeerProcessState, PeerSummary, SwarmSummary
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


def after_the_kill() -> KillTest:
    """Return a kill test whose victim was killed in round 10."""
    drill = KillTest(3)
    assert act(drill, peer(10), peer(10), peer(10)) == "kill"
    return drill


def test_nothing_happens_before_half_way() -> None:
    drill = KillTest(3)
    assert act(drill, peer(9), peer(9), peer(9)) is None
    assert (drill.lost_count, drill.rejoined_count) == (0, 0)


def test_victim_is_killed_half_way_restarted_and_confirmed() -> None:
    drill = KillTest(3)
    assert drill.next_action(view(peer(10), peer(10), peer(10))) == KillTestAction(
        "kill", "drill: killed peer in round 10"
    )
    gone = peer(10, state="lost")
    assert act(drill, peer(10, 2), peer(10, 2), gone) is None
    assert act(drill, peer(11, 2), peer(11, 2), gone) == "start"
    assert (drill.lost_count, drill.rejoined_count) == (1, 0)
    assert act(drill, peer(12, 3), peer(12, 3), PeerSummary("peer", "starting", None)) is None
    assert act(drill, peer(13, 3), peer(13, 3), peer(13, 3, included=10)) is None  # included before the kill
    assert act(drill, peer(16, 3), peer(16, 3), peer(14, 3, included=13)) is None  # still behind
    assert act(drill, peer(17, 3), peer(16, 3), peer(16, 3, included=15)) == "none"
    assert (drill.lost_count, drill.rejoined_count) == (1, 1)
    assert act(drill, peer(18), peer(18), peer(18)) is None


def test_rounds_committed_alone_do_not_count_as_rejoined() -> None:
    """The victim returned after the others' end and reached the target alone, with another model."""
    drill, gone = after_the_kill(), peer(10, state="lost")
    assert act(drill, peer(11, 2), peer(11, 2), gone) == "start"
    others = (peer(20, state="ended"), peer(20, state="ended"))
    assert act(drill, *others, peer(20, 1, included=19, digest="other")) is None
    assert act(drill, *others, peer(19, 1, included=18)) is None
    assert drill.rejoined_count == 0
    assert act(drill, *others, peer(20, 3, included=19)) == "none"


def test_slowest_survivor_decides_about_the_restart() -> None:
    drill, gone = after_the_kill(), peer(10, state="lost")
    assert act(drill, peer(12, 2), peer(10, 2), gone) is None


def test_restart_waits_longer_if_the_loss_was_not_noticed() -> None:
    drill, gone = after_the_kill(), peer(10, state="lost")
    assert act(drill, peer(12), peer(12), gone) is None
    assert act(drill, peer(13), peer(13), gone) == "start"


def test_restart_does_not_wait_when_few_rounds_are_left() -> None:
    drill = KillTest(3)
    assert act(drill, peer(3), peer(3), peer(3), target=6) == "kill"
    assert act(drill, peer(4), peer(4), peer(3, state="lost"), target=6) == "start"


def test_victim_is_restarted_if_the_others_cannot_continue() -> None:
    drill, gone = after_the_kill(), peer(10, state="lost")
    assert act(drill, peer(10), peer(10), gone, elapsed=RESTART_AFTER_SECONDS) is None
    order = drill.next_action(view(peer(10), peer(10), gone, elapsed=RESTART_AFTER_SECONDS + 1))
    assert order == KillTestAction("start", "drill: the others wait; restarting peer")


def test_stopped_or_single_peer_is_not_killed() -> None:
    assert act(KillTest(2), peer(15), peer(15, state="lost")) is None
    assert act(KillTest(1), peer(15)) is None
