"""When a peer may leave a run that has reached its target."""

from typing import Any

import pytest

from node.loop.actions import LeaveRun, LoopAction, ReportPhase
from node.loop.departure import (
    ARRIVAL_SECONDS,
    KEEPING_SECONDS,
    MEASURING_SECONDS,
    MIN_HANDOVER_SECONDS,
    RETURN_SECONDS,
    Departure,
)
from node.loop.options import LoopOptions, RoundOptions, SyncOptions
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.steering import Steering
from protocol.consensus.chain import Chain, ChainHead, ChainLog
from protocol.electorate import Electorate
from protocol.manifest.sections import TargetSection
from protocol.steering import REFERENCE_MANIFEST, RevisionLog
from tests.node.loop.test_steering import signed_revision

HEAD, EARLIER = ChainHead(8, b"h" * 32, 800), ChainHead(7, b"e" * 32, 700)
STATE = b"s" * 32
FINAL, LATE = PeerState(HEAD, STATE), PeerState(EARLIER, b"t" * 32)
HOST, LATE_HOST = PeerState(HEAD, STATE, is_trainer=False), PeerState(EARLIER, b"t" * 32, is_trainer=False)
WATCHER = PeerState(None, is_trainer=False)


class Leaving:
    """A peer "me" that has reached the target at time 0, and the others that it sees."""

    def __init__(
        self, others: dict[str, PeerState], *, has_restarted: bool = False, keepers: int = 1,
        organiser_key: str = "", **options: Any,
    ) -> None:  # fmt: skip
        round_options = RoundOptions("me", lambda number: None, None)  # type: ignore[arg-type, return-value]
        target = TargetSection(rounds=HEAD.round, keepers=keepers)
        self.log = RevisionLog()
        run = REFERENCE_MANIFEST.run.model_copy(update={"organiser_key": organiser_key})
        manifest = REFERENCE_MANIFEST.model_copy(update={"target": target, "run": run})
        steering = Steering(manifest, Chain(HEAD, ChainLog(Electorate.at_genesis())), self.log)
        values = {"expiry": 15.0, "has_contacts": True, **options}
        self.departure = Departure(LoopOptions(round_options, steering, **values))
        self.now = 0.0
        self.see(others)
        self.departure.begin(HEAD, STATE, has_restarted, self.now)

    def see(self, others: dict[str, PeerState], left: dict[str, PeerState] | None = None) -> None:
        self.departure.set_snapshot(SwarmSnapshot({"me": FINAL, **others}, left or {}))

    def reason(self) -> str | None:
        """Return why it stays; None once it leaves."""
        actions: list[LoopAction] = [*self.departure.advance(self.now)]
        if LeaveRun() in actions:
            assert self.departure.advance(self.now) == [], "it leaves once"
            return None
        reasons = [action.reason for action in actions if isinstance(action, ReportPhase)]
        return reasons[-1] if reasons else "as before"

    def leaves_at(self) -> float:
        """Let time pass to each deadline in turn; return when it leaves."""
        while self.reason() is not None:
            deadline = self.departure.next_deadline()
            assert deadline is not None and deadline > self.now, "it would wait for ever"
            self.now = deadline
        return self.now


def test_peer_leaves_at_once_when_another_trainer_has_the_final_state() -> None:
    assert Leaving({"a": FINAL}).leaves_at() == 0.0


def test_peer_waits_for_the_loss_of_the_final_model_which_another_one_measures() -> None:
    """Controls: a run whose losses nobody measures, a peer that comes back, and one that never measures."""
    others = {"a": PeerState(HEAD, STATE, validation_round=7)}
    peer = Leaving(others)
    assert peer.reason() == "the target is reached; waiting for the validation loss of the final model"
    peer.see({"a": PeerState(HEAD, STATE, validation_round=8)})
    assert peer.reason() is None
    left = Leaving(others)
    left.see({"b": FINAL}, {"a": PeerState(HEAD, STATE, validation_round=8)})
    assert left.reason() is None, "its goodbye had the loss"
    assert Leaving(others).leaves_at() == MEASURING_SECONDS
    assert Leaving(others, has_restarted=True).leaves_at() == 0.0
    assert Leaving({"a": FINAL}).leaves_at() == 0.0


def test_last_peer_stays_until_another_machine_holds_the_final_state() -> None:
    peer = Leaving({"host": WATCHER})
    assert peer.reason() == "the target is reached; waiting until 1 other machine holds the final model"
    peer.now = KEEPING_SECONDS - 1
    assert peer.reason() is not None
    peer.see({"host": HOST})
    assert peer.reason() is None


def test_without_keepers_the_last_peer_leaves_at_once() -> None:
    assert Leaving({"host": WATCHER}, keepers=0).leaves_at() == 0.0
    assert Leaving({"host": LATE_HOST}, keepers=0).leaves_at() == 0.0


def test_as_many_machines_as_the_manifest_asks_for_must_hold_it() -> None:
    peer = Leaving({"a": FINAL}, keepers=3)
    assert peer.reason() == "the target is reached; waiting until 2 other machines hold the final model"
    peer.see({"a": FINAL, "b": FINAL, "host": HOST})
    assert peer.reason() is None


@pytest.mark.parametrize("claim", [PeerState(HEAD, b"x" * 32), PeerState(HEAD), PeerState(EARLIER, STATE)])
def test_machine_with_another_state_does_not_count(claim: PeerState) -> None:
    peer = Leaving({"liar": claim})
    peer.now = ARRIVAL_SECONDS + 1
    assert peer.reason() is not None


def test_peers_with_states_of_their_own_count_by_their_head() -> None:
    assert Leaving({"a": PeerState(HEAD, b"x" * 32)}, sync=SyncOptions(compares_states=False)).leaves_at() == 0.0


def test_trainers_hold_each_other_up_only_until_a_present_host_has_the_state() -> None:
    peer = Leaving({"a": FINAL, "host": LATE_HOST})
    assert peer.reason() == "the target is reached; waiting until the host holds the final model"
    assert peer.leaves_at() == MIN_HANDOVER_SECONDS, "a host whose disk is full does not hold a run up"
    fast = Leaving({"a": FINAL, "host": LATE_HOST})
    assert fast.reason() is not None
    fast.see({"a": FINAL, "host": HOST})
    assert fast.reason() is None


def test_large_state_gives_a_host_more_time() -> None:
    assert Leaving({"a": FINAL, "host": LATE_HOST}, state_bytes=10**9).leaves_at() == MIN_HANDOVER_SECONDS + 2000


def test_late_trainers_are_waited_for_but_not_for_long() -> None:
    peer = Leaving({"a": FINAL, "b": LATE})
    assert peer.reason() == "the target is reached; waiting for 1 other peer"
    assert peer.leaves_at() == ARRIVAL_SECONDS


def test_trainer_that_comes_back_meanwhile_gets_time_to_fetch_the_final_state() -> None:
    """Else it would find nobody, make the last rounds again alone, and hold another model of the same run."""
    peer = Leaving({"a": FINAL})
    peer.see({"a": PeerState(HEAD, STATE, validation_round=7)})  # it has to wait for the loss
    assert peer.reason() is not None
    peer.now = 4.0
    peer.see({"a": FINAL, "back": PeerState(EARLIER, b"t" * 32)})
    assert peer.leaves_at() == 4.0 + MIN_HANDOVER_SECONDS
    quick = Leaving({"host": WATCHER})
    assert quick.reason() is not None
    quick.see({"a": FINAL, "back": LATE})
    assert quick.reason() == "the target is reached; waiting for 1 other peer"
    quick.see({"a": FINAL, "back": FINAL})
    assert quick.reason() is None


def test_new_keys_do_not_hold_a_peer_up_again_and_again() -> None:
    peer = Leaving({"host": WATCHER})
    for number in range(20):
        peer.now = 10.0 * number
        peer.see({"a": FINAL, f"stranger-{number}": LATE})
        if peer.reason() is None:
            break
    assert ARRIVAL_SECONDS < peer.now <= ARRIVAL_SECONDS + MIN_HANDOVER_SECONDS


def test_peer_that_left_with_the_final_state_counts() -> None:
    peer = Leaving({"b": LATE})
    assert peer.reason() is not None
    peer.see({}, left={"a": FINAL})
    assert peer.reason() is None
    alone = Leaving({"b": LATE})
    alone.now = ARRIVAL_SECONDS
    alone.see({}, left={"a": LATE})
    assert alone.reason() is not None, "who left without it does not"


def test_peer_that_trains_alone_by_design_waits_for_nobody() -> None:
    assert Leaving({}, has_contacts=False).leaves_at() == 0.0
    assert Leaving({}, has_contacts=False, min_peers=2).leaves_at() == KEEPING_SECONDS
    bereft = Leaving({"a": LATE}, has_contacts=False)
    bereft.see({})
    assert bereft.leaves_at() == KEEPING_SECONDS, "it was not alone"


def test_restarted_peer_leaves_soon_if_nobody_is_there_and_serves_a_host_that_is() -> None:
    assert Leaving({}, has_restarted=True).leaves_at() == 15.0
    peer = Leaving({}, has_restarted=True)
    assert peer.reason() is not None
    peer.now = 10.0
    peer.see({"host": LATE_HOST})
    assert peer.leaves_at() == 10.0 + MIN_HANDOVER_SECONDS


def test_host_that_comes_late_gets_its_time() -> None:
    peer = Leaving({"a": LATE}, expiry=1.0)
    peer.now = KEEPING_SECONDS - 1.0
    peer.see({"host": LATE_HOST})
    assert peer.leaves_at() == KEEPING_SECONDS - 1.0 + MIN_HANDOVER_SECONDS


def test_host_that_trains_serves_the_final_state_until_it_is_stopped() -> None:
    host = Leaving({"a": FINAL}, stays=True)
    assert host.reason() == "the target is reached; waiting until this host is stopped"
    assert host.departure.next_deadline() is None


def test_a_reason_is_reported_once() -> None:
    peer = Leaving({"host": WATCHER})
    assert len(peer.departure.advance(0.0)) == 1 and peer.departure.advance(1.0) == []


def test_peer_that_waits_after_the_target_goes_on_when_the_organiser_extends_the_run() -> None:
    peer = Leaving({"a": LATE})
    assert peer.reason() == "the target is reached; waiting for 1 other peer"
    peer.log.add(signed_revision((), 0, target__rounds=20))
    assert LeaveRun(is_extended=True) in peer.departure.advance(1.0)
    assert peer.departure.advance(2.0) == [] and peer.departure.next_deadline() is None


def test_peer_that_returns_to_a_steered_run_waits_to_hear_of_an_extension() -> None:
    assert Leaving({"a": FINAL}, has_restarted=True).leaves_at() == 0.0
    assert Leaving({"a": FINAL}, has_restarted=True, organiser_key="12D3").leaves_at() == RETURN_SECONDS
    assert Leaving({"a": FINAL}, organiser_key="12D3").leaves_at() == 0.0, "it has heard all along"


def test_peer_waits_a_while_for_a_revision_that_another_announces() -> None:
    peer = Leaving({"a": PeerState(HEAD, STATE, revision=b"r" * 32)})
    assert peer.reason() == "the target is reached; waiting for the organiser's newest revision"
    assert peer.leaves_at() == ARRIVAL_SECONDS
