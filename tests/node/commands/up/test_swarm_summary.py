from node.commands.up.swarm_summary import (
    PeerProcessState,
    PeerSummary,
    PeerTotals,
    SwarmSummary,
    compute_share,
)
from node.monitoring.status import NodeStatus


def status(round_number: int = 0, **changes: object) -> NodeStatus:
    values = {"peer_id": "p", "run": "demo", "run_id": "00", "phase": "training", "round": round_number} | changes
    return NodeStatus.model_validate(values)


def peer(round_number: int, state: PeerProcessState = "running", **changes: object) -> PeerSummary:
    return PeerSummary(f"peer-{round_number}", state, status(round_number, **changes))


def view(*peers: PeerSummary, rounds: int | None = 20, tokens: int | None = None, elapsed: float = 0.0) -> SwarmSummary:
    return SwarmSummary("demo", rounds, tokens, elapsed, peers)


def test_progress_is_that_of_the_most_advanced_peer() -> None:
    seen = view(peer(3), peer(5), PeerSummary("new", "starting", None))
    assert seen.round == 5
    assert seen.progress == 0.25
    assert len(seen.running_peers) == 2


def test_progress_is_towards_the_nearer_target() -> None:
    assert view(peer(1, chain_tokens=300), rounds=None, tokens=400).progress == 0.75
    assert view(peer(10, chain_tokens=100), rounds=20, tokens=400).progress == 0.5
    assert view(peer(10), rounds=None).progress == 0.0
    assert view(peer(30)).progress == 1.0


def test_state_word_is_the_phase_of_a_running_peer() -> None:
    assert peer(1, phase="catching up").state_word == "catching up"
    assert peer(1, paused="others use it").state_word == "paused"
    assert peer(1, "lost", paused="others use it").state_word == "lost"
    assert PeerSummary("a", "starting", None).state_word == "starting"


def test_totals_add_bytes_of_starts_and_not_of_repeated_polls() -> None:
    ledger = PeerTotals({})
    ledger.record(status(since=1.0, bytes_sent=10, seconds={"compute": 1.0}))
    ledger.record(status(since=1.0, bytes_sent=30, seconds={"compute": 3.0, "wait": 1.0}))
    ledger.record(status(since=9.0, bytes_sent=5))
    assert ledger.bytes_sent == 35
    assert ledger.newest_seconds() == {"compute": 3.0, "wait": 1.0}, "its trainer has not told any yet"


def test_restarted_peer_counts_once_in_the_compute_share() -> None:
    """Its trainer continues the seconds of its checkpoint, here 8 of 10. Control: its bytes start from zero."""
    restarted, idle = PeerTotals({}), PeerTotals({1.0: status(seconds={"wait": 12.0})})
    restarted.record(status(since=1.0, bytes_sent=10, seconds={"compute": 10.0}))
    restarted.record(status(since=9.0, bytes_sent=5, seconds={"compute": 12.0}))
    assert compute_share([restarted, idle]) == 0.5 and restarted.bytes_sent == 15


def test_compute_share_covers_all_peers() -> None:
    busy, idle = PeerTotals({1.0: status(seconds={"compute": 6.0})}), PeerTotals({1.0: status(seconds={"wait": 2.0})})
    assert compute_share([busy, idle]) == 0.75
    assert compute_share([PeerTotals({})]) is None
