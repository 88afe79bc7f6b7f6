"""What one stranger takes from the pace of honest peers, with the rules and without: the virtual pipeline."""

from collections.abc import Callable

import pytest

from protocol.pipeline.messages import Answer, HeldBlob, Inputs, Task
from protocol.pipeline.server_events import CloseStep, OwnersChanged, TakeStep
from tests.protocol.pipeline.test_server import G, X, Y, ask, make_server, make_task
from tests.protocol.pipeline.virtual.attackers import (
    AttackedWorld,
    BlackHoles,
    Inventors,
    Withholders,
    believes_rates_and_waits_for_outcomes,
    trusts_gradients_without_forwards,
    waits_as_long_as_owners_ask,
)
from tests.slices import sliced

SECONDS = 200.0
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "old_rule"),
    [(Withholders, waits_as_long_as_owners_ask), (BlackHoles, believes_rates_and_waits_for_outcomes)],
)
def test_stranger_takes_less_than_a_fifth_of_the_pace(
    world: type[AttackedWorld], old_rule: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, attacked = world(is_attacked=False).measure(SECONDS), world().measure(SECONDS)
    old_rule(monkeypatch)
    control = world().measure(SECONDS)
    print(f"{honest:.2f} microbatches a second, {attacked:.2f} beside a stranger, {control:.2f} by the old rule")
    assert attacked >= 0.8 * honest and control < 0.1 * honest


@pytest.mark.slow
@pytest.mark.parametrize("has_standing", sliced([True, False], 1))
def test_withheld_backwards_are_counted_and_their_owners_turned_away(has_standing: bool) -> None:
    """Without known standing each owner is judged by itself."""
    world, honest = Withholders(), Withholders(is_attacked=False)
    if not has_standing:
        world.standing = honest.standing = None
    assert world.measure(SECONDS) >= 0.8 * honest.measure(SECONDS)
    assert world.served("left_behind") > 0 and world.served("turned_away") > 100
    assert honest.served("left_behind") == honest.served("turned_away") == 0, "honest owners are in time"


@pytest.mark.slow
def test_owners_count_the_tasks_that_a_black_hole_accepts() -> None:
    world = BlackHoles()
    world.measure(SECONDS)
    assert sum(peer.owner.counts.overdue for peer in world.honest_servers) > 0


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [False, True], ids=["rule", "control"])
def test_gradient_without_a_forward_is_added_for_no_stranger(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_old:
        trusts_gradients_without_forwards(monkeypatch)
    world = Inventors()
    world.measure(60.0)
    assert (world.invented > 0) == is_old and (world.served("without_forward") > 100) != is_old


def test_stranger_may_bring_as_many_backwards_from_elsewhere_as_it_had_forwards_here() -> None:
    server = make_server(step_size=8, memory=10**5)
    server.handle(OwnersChanged({"owner": 0, "other": 0}, frozenset({"owner"}), "owner"), 0.0)
    assert ask(server, make_task(0, "backward", owner="other"))[0] == "no forward"
    assert ask(server, make_task(0, "backward"))[0] == "accepted", "an owner with standing"
    assert ask(server, make_task(1, owner="other"))[0] == "accepted"
    assert ask(server, make_task(2, "backward", owner="other"))[0] == "accepted"
    assert ask(server, make_task(3, "backward", owner="other"))[0] == "no forward"
    assert ask(server, make_task(1, "backward", owner="other"))[0] == "accepted", "its own"
    assert server.counts.without_forward == 2


def test_closing_step_leaves_open_microbatches_behind() -> None:
    """Also one whose backward names a gradient that nobody delivers."""
    server = make_server(step_size=4)
    for serial in (0, 1):
        ask(server, make_task(serial))
    ask(server, make_task(2, owner="other"))
    ask(server, make_task(0, "backward"))
    server.ask(make_task(2, "backward", owner="other"), 1.0)
    server.handle(CloseStep(), 1.0)
    deadline = server.next_deadline()
    assert deadline == 30.0
    actions = server.advance(deadline)
    assert [each.ledger for each in actions if isinstance(each, TakeStep)] and server.counts.left_behind == 2
    kind, _ = ask(server, make_task(1, "backward"))
    assert kind == "accepted", "its gradient joins a later step"


def test_pause_of_a_late_owner_doubles_and_leaves_it_alone_if_nobody_else_is_there() -> None:
    punctuality = make_server().table.punctuality
    punctuality.me = "me"
    punctuality.record("me", 0.5, is_late=False)
    assert punctuality.patience == 2.0
    pauses, now = [], 0.0
    for _ in range(8):
        punctuality.leave_behind("late", now)
        pauses.append(punctuality.pause("late", now))
        now += pauses[-1]
    assert pauses == [4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 128.0, 128.0]
    punctuality.leave_behind("me", now)
    assert punctuality.pause("me", now) == 0.0, "nobody else has done anything"


def fill_with_replays(server_shares: int, owners: int) -> list[str]:
    """Let a stranger send replays and backwards until none is accepted; return the answers to an honest owner then."""
    server = make_server(step_size=100, memory=12_800)
    names = [f"owner-{number}" for number in range(owners)]
    server.handle(OwnersChanged(dict.fromkeys([*names, "owner", "other"], 0)), 0.0)
    server.table.memory.shares = server_shares

    def send(task: Task) -> Answer:
        return server.ask(task, 0.0)[0]

    for serial in range(100):
        send(Task(**{**vars(make_task(serial, owner="other")), "replay": True}))
    for serial in range(100, 200):
        send(make_task(serial, "backward", owner="other"))
    return [send(make_task(serial, "backward")).kind for serial in range(4)]


def test_replays_and_backwards_count_within_the_share_of_their_owner() -> None:
    assert fill_with_replays(server_shares=4, owners=2) == ["accepted"] * 4
    assert fill_with_replays(server_shares=1, owners=2) == ["busy"] * 4, "the control: one share for all"


def test_backward_that_overtakes_its_forward_frees_the_place_of_both() -> None:
    server = make_server(step_size=4)
    server.ask(make_task(0), 0.0)  # its activation never comes
    other = HeldBlob(Y, "elsewhere")
    ask(server, Task(**{**vars(make_task(0, "backward")), "inputs": Inputs(other, None, G)}))
    assert not server.table.unfinished and X.blob != other.blob
