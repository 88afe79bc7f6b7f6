from dataclasses import replace

import pytest

from protocol.blobs.blob import Blob
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Direction, HeldBlob, Inputs, Key, Task
from protocol.pipeline.server import StageServer
from protocol.pipeline.server_events import (
    Action,
    CloseStep,
    Compute,
    Computed,
    Drain,
    Drop,
    Event,
    FetchInputs,
    InputsFetched,
    Invite,
    OwnersChanged,
    ReleasedBy,
    SendOutcome,
    Stepped,
    TakeStep,
    TrainerRestarted,
)
from protocol.pipeline.stage import StageSettings
from protocol.pipeline.steps import LocalSteps

RUN = "ab" * 32
SETTINGS = StageSettings(RUN, 1, 3, activation_bytes=100, token_bytes=10, step_size=2, memory=2000)
X = HeldBlob(Blob(bytes(32), 100), "before")
G = HeldBlob(Blob(bytes([1]) * 32, 100), "after")
Y = Blob(bytes([2]) * 32, 100)


def make_task(serial: int, direction: Direction = "forward", owner: str = "owner", life: int = 7) -> Task:
    inputs = Inputs(activation=X, gradient=G if direction == "backward" else None)
    return Task(RUN, owner, serial, direction, 1, life, 0, inputs, 60_000)


def make_server(**changes: int) -> StageServer:
    server = StageServer(LocalSteps(replace(SETTINGS, **changes), Ledger()), life=7, round_number=0)  # type: ignore[arg-type]
    server.handle(OwnersChanged({"owner": 0, "other": 0}), 0.0)
    return server


def carry_out(server: StageServer, actions: list[Action]) -> list[Action]:
    """Fetch and compute everything; return all other actions."""
    rest: list[Action] = []
    while actions:
        action = actions.pop(0)
        if isinstance(action, FetchInputs):
            actions += server.handle(InputsFetched(action.key, action.direction, action.token), 0.0)
        elif isinstance(action, Compute):
            key, direction = action.task.key, action.task.direction
            actions += server.handle(Computed(key, direction, action.token, True, Y, None, 10.0), 0.0)
        else:
            rest.append(action)
    return rest


def ask(server: StageServer, task: Task) -> tuple[str, list[Action]]:
    answer, actions = server.ask(task, 0.0)
    return answer.kind, carry_out(server, actions)


def test_a_step_takes_in_its_forwards_and_waits_for_their_backwards() -> None:
    server = make_server()
    assert [ask(server, make_task(serial))[0] for serial in range(3)] == ["accepted", "accepted", "busy"]
    assert not any(isinstance(each, TakeStep) for each in ask(server, make_task(0, "backward"))[1])
    _, actions = ask(server, make_task(1, "backward"))
    steps = [each.ledger for each in actions if isinstance(each, TakeStep)]
    assert steps == [Ledger([Key("owner", 0), Key("owner", 1)])]
    server.handle(Stepped(), 0.0)
    assert ask(server, make_task(2))[0] == "accepted"
    assert server.steps.take_ledger() == steps[0] and not server.steps.ledger


def test_owners_that_found_the_step_full_are_invited_once_when_it_ends() -> None:
    server = make_server(step_size=3)
    for serial in range(3):
        ask(server, make_task(serial))
    assert [ask(server, make_task(serial, owner=owner))[0] for owner in ("other", "owner") for serial in (3, 4)] == [
        "busy"
    ] * 4
    later = [action for serial in range(3) for action in ask(server, make_task(serial, "backward"))[1]]
    assert not [action for action in later if isinstance(action, Invite)], "the step has no place yet"
    assert server.handle(Stepped(), 0.0) == [Invite("other"), Invite("owner")]
    assert server.advance(0.0) == []


def test_an_owner_that_is_gone_is_not_invited() -> None:
    server = make_server(step_size=1)
    ask(server, make_task(0))
    assert ask(server, make_task(1, owner="other"))[0] == "busy"
    ask(server, make_task(0, "backward"))
    server.handle(OwnersChanged({"owner": 0}), 0.0)
    assert server.handle(Stepped(), 0.0) == []


def test_forwards_wait_at_their_owners_once_a_second_of_work_is_here() -> None:
    server = make_server(step_size=1000, memory=10**6)
    for serial in (0, 1):  # each pass takes 10 ms, so there is room for 126 tasks
        ask(server, make_task(serial))
        ask(server, make_task(serial, "backward"))
    assert server.rate == 50.0
    kinds = [server.ask(make_task(serial), 0.0)[0].kind for serial in range(2, 128)]
    assert set(kinds) == {"accepted"}
    backwards = [replace(make_task(serial, "backward"), owner="other") for serial in range(10)]
    assert {server.ask(task, 0.0)[0].kind for task in backwards} == {"accepted"}, "they need no place"
    assert server.ask(make_task(128), 0.0)[0].kind == "busy"


def test_a_repeated_task_is_known_and_adds_nothing() -> None:
    server = make_server()
    ask(server, make_task(0))
    ask(server, make_task(0, "backward"))
    kind, actions = ask(server, make_task(0, "backward"))
    assert (kind, actions, len(server.steps.open_step.added), server.counts.duplicates) == ("known", [], 1, 1)


def test_a_task_for_an_earlier_life_is_refused() -> None:
    """A late copy of a request must not be computed by a server that has restarted since."""
    server = make_server()
    assert ask(server, make_task(0, "backward", life=6))[0] == "other life"
    assert not server.steps.open_step.added
    assert ask(server, make_task(0, "backward", life=0))[0] == "accepted", "without a number nobody could know"
    assert len(server.steps.open_step.added) == 1


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        (replace(make_task(0), run="cd" * 32), "other stage"),
        (replace(make_task(0), round=9), "other round"),
        (replace(make_task(0), round=8), "accepted"),
        (replace(make_task(0), inputs=Inputs()), "refused"),
        (replace(make_task(0), inputs=Inputs(HeldBlob(Blob(bytes(32), 99), "before"))), "refused"),
        (replace(make_task(0), inputs=Inputs(X, tokens=X)), "refused"),
        (replace(make_task(0), inputs=Inputs(X, gradient=G)), "refused"),
        (replace(make_task(0, "backward"), inputs=Inputs(X)), "refused"),
    ],
)
def test_tasks_of_another_kind_are_refused(task: Task, kind: str) -> None:
    server = make_server()
    assert ask(server, task)[0] == kind
    assert server.counts.answers == {kind: 1}


def test_a_step_ends_although_its_owner_has_gone_on_by_several_rounds() -> None:
    """A refused backward would hold up the step, and the step the round that its server applies after it."""
    server = make_server()
    for serial in (0, 1):
        ask(server, make_task(serial))
    later = [replace(make_task(serial, "backward"), round=9) for serial in (0, 1)]
    assert [ask(server, task)[0] for task in later] == ["accepted", "accepted"] and len(
        server.steps.open_step.added
    ) == 2
    assert ask(server, replace(make_task(2), round=9))[0] == "other round"  # control: nothing waits for this one


def test_memory_is_shared_between_owners_and_a_part_is_for_backwards() -> None:
    server = make_server(step_size=100, memory=1600)  # 1200 for forwards of 200, half of it for each owner
    assert [ask(server, make_task(serial))[0] for serial in range(4)] == ["accepted"] * 3 + ["busy"]
    assert [ask(server, make_task(serial, owner="other"))[0] for serial in range(4)] == ["accepted"] * 3 + ["busy"]
    assert ask(server, make_task(0, "backward"))[0] == "accepted"
    assert server.table.memory.used == 1100  # its output and input are free again
    server.handle(ReleasedBy("owner", (0, 1, 2)), 0.0)
    server.handle(ReleasedBy("other", (0, 1, 2)), 0.0)
    assert server.table.memory.used == 0


def test_microbatches_of_dead_owners_are_withdrawn_and_partly_counted_ones_reported() -> None:
    server = make_server(step_size=3)
    for serial in (0, 1):
        ask(server, make_task(serial, owner="other"))
    ask(server, make_task(0, "backward", owner="other"))
    server.handle(OwnersChanged({"owner": 0}), 0.0)
    assert (server.counts.withdrawn, server.counts.partly_counted) == (1, 1)
    assert not server.steps.open_step.holds(Key("other", 1))
    assert server.table.memory.used == 0 and len(server.steps.open_step.added) == 1


def test_microbatches_that_an_owner_began_before_it_restarted_are_withdrawn() -> None:
    server = make_server(step_size=3)
    for serial in (0, 1):
        ask(server, make_task(serial, owner="other"))
    ask(server, make_task(0, "backward", owner="other"))
    ask(server, make_task(0))
    server.handle(OwnersChanged({"owner": 0, "other": 0}), 0.0)
    assert server.counts.withdrawn == 0, "the control: it has not restarted"
    server.handle(OwnersChanged({"owner": 0, "other": 7}), 0.0)
    assert (server.counts.withdrawn, server.counts.partly_counted, server.steps.open_step.open_count) == (1, 1, 1)
    assert {key.owner for key in server.table.entries} == {"owner"}
    assert ask(server, make_task(1, owner="other"))[0] == "busy", "a late copy"
    assert ask(server, make_task(7, owner="other"))[0] == "accepted"


def test_a_gradient_that_is_computed_while_its_owner_seems_gone_counts_once() -> None:
    server = make_server(step_size=1)
    ask(server, make_task(0, owner="other"))
    _, (fetch, *_) = server.ask(make_task(0, "backward", owner="other"), 0.0)
    assert isinstance(fetch, FetchInputs)
    (compute,) = server.handle(InputsFetched(fetch.key, "backward", fetch.token), 0.0)
    assert isinstance(compute, Compute) and compute.adds
    server.handle(OwnersChanged({"owner": 0}), 0.0)
    server.handle(Computed(fetch.key, "backward", compute.token, True, Y, None, 10.0), 0.0)
    server.handle(Stepped(), 0.0)
    assert list(server.steps.take_ledger()) == [Key("other", 0)]
    server.handle(OwnersChanged({"owner": 0, "other": 0}), 0.0)
    answer, actions = server.ask(make_task(0, "backward", owner="other"), 0.0)
    assert answer.outcome is not None and answer.outcome.status == "ended" and not actions


def test_a_microbatch_past_its_deadline_is_struck() -> None:
    server = make_server()
    ask(server, make_task(0))
    assert server.next_deadline() == 30.0, "the step waits no longer than that"
    server.advance(60.0)
    assert (server.counts.withdrawn, server.table.memory.used, server.next_deadline()) == (1, 0, None)
    assert ask(server, make_task(0, "backward"))[0] == "accepted", "its gradient joins the open step"


def test_a_restarted_trainer_loses_what_its_snapshot_lacks() -> None:
    server = make_server()
    for serial in (0, 1):
        ask(server, make_task(serial))
    ask(server, make_task(0, "backward"))
    actions = server.handle(TrainerRestarted(8, Ledger()), 0.0)
    assert [each.outcome.status for each in actions if isinstance(each, SendOutcome)] == ["void"]
    assert server.counts.lost == 1 and not server.steps.open_step.added
    assert ask(server, make_task(0, "backward", life=8))[0] == "accepted"
    answer, _ = server.ask(make_task(1, life=8), 0.0)
    assert answer.outcome is not None and answer.outcome.life == 8, "results in memory outlive the trainer"


def test_what_the_ledger_of_a_snapshot_contains_is_not_added_again() -> None:
    server = StageServer(LocalSteps(SETTINGS, Ledger([Key("owner", 0)])), 8, 0)
    server.handle(OwnersChanged({"owner": 0}), 0.0)
    _, actions = ask(server, make_task(0, "backward", life=8))
    outcomes = [each.outcome for each in actions if isinstance(each, SendOutcome)]
    assert [(each.status, each.added) for each in outcomes] == [("done", True)]
    assert not server.steps.open_step.added


def test_a_late_task_of_an_ended_microbatch_adds_nothing() -> None:
    server = make_server()
    ask(server, make_task(0))
    server.handle(ReleasedBy("owner", (0,)), 0.0)
    answer, actions = server.ask(make_task(0, "backward"), 0.0)
    assert answer.outcome is not None and answer.outcome.status == "ended" and not actions


def test_a_draining_server_finishes_its_step_and_accepts_nothing_else() -> None:
    server = make_server()
    ask(server, make_task(0))
    server.handle(Drain(), 0.0)
    assert ask(server, make_task(1))[0] == "sealed"
    kind, actions = ask(server, make_task(0, "backward"))
    assert kind == "accepted" and any(isinstance(each, TakeStep) for each in actions)
    server.handle(Stepped(), 0.0)
    assert not server.is_idle, "the gradient of its input is still needed"
    server.handle(ReleasedBy("owner", (0,)), 0.0)
    assert server.is_idle


def test_a_round_that_asks_early_gets_a_shorter_step() -> None:
    server = make_server()
    ask(server, make_task(0))
    server.handle(CloseStep(), 0.0)
    assert ask(server, make_task(1))[0] == "busy"
    _, actions = ask(server, make_task(0, "backward"))
    assert any(isinstance(each, TakeStep) for each in actions)
    server.handle(Stepped(), 0.0)
    server.handle(CloseStep(), 0.0)
    assert ask(server, make_task(1))[0] == "accepted", "an empty step cannot end"


def test_a_gradient_that_is_not_finite_is_refused_and_not_counted() -> None:
    server = make_server()
    answer, actions = server.ask(make_task(0, "backward"), 0.0)
    (fetch,) = [each for each in actions if isinstance(each, FetchInputs)]
    (compute,) = [
        each
        for each in server.handle(InputsFetched(fetch.key, "backward", fetch.token), 0.0)
        if isinstance(each, Compute)
    ]
    told = server.handle(Computed(fetch.key, "backward", compute.token, False, None, None, 1.0), 0.0)
    assert [each.outcome.status for each in told if isinstance(each, SendOutcome)] == ["invalid"]
    assert answer.kind == "accepted" and not server.steps.open_step.added and server.table.memory.used == 0
    assert server.counts.invalid == 1
    answer, actions = server.ask(make_task(0, "backward"), 0.0)
    assert answer.kind == "known" and not actions, "a late copy: its owner may have asked another peer since"
    assert server.ask(replace(make_task(0, "backward"), attempt=2), 0.0)[0].kind == "accepted"


@pytest.mark.parametrize("event", [ReleasedBy("owner", (0,)), OwnersChanged({"other": 0}), None], ids=repr)
def test_inputs_of_a_microbatch_that_is_given_up_stay_until_the_trainer_has_read_them(event: Event | None) -> None:
    server = make_server()
    ask(server, make_task(0))
    _, actions = server.ask(make_task(0, "backward"), 0.0)
    fetch = next(each for each in actions if isinstance(each, FetchInputs))
    compute = next(iter(server.handle(InputsFetched(fetch.key, fetch.direction, fetch.token), 0.0)))
    assert isinstance(compute, Compute)
    freed = server.handle(event, 100.0) if event is not None else server.advance(100.0)
    drops = [each for each in freed if isinstance(each, Drop)]
    assert all(each.kept == {X.blob, G.blob} for each in drops) and drops and server.table.memory.used
    done = server.handle(Computed(compute.task.key, "backward", compute.token, True, Y, None, 10.0), 100.0)
    assert Drop(compute.task.key) in done and not server.table.memory.used


def test_inputs_that_a_dead_trainer_read_are_freed() -> None:
    server = make_server()
    _, actions = server.ask(make_task(0), 0.0)
    fetch = next(each for each in actions if isinstance(each, FetchInputs))
    server.handle(InputsFetched(fetch.key, fetch.direction, fetch.token), 0.0)
    server.handle(ReleasedBy("owner", (0,)), 0.0)
    assert server.table.memory.used
    assert Drop(fetch.key) in server.handle(TrainerRestarted(8, Ledger()), 0.0) and not server.table.memory.used


def admitted_forwards(server: StageServer, owner: str, first: int = 0) -> int:
    """Return how many forwards of an owner are admitted before the server is busy."""
    count = 0
    while server.ask(make_task(first + count, owner=owner), 0.0)[0].kind == "accepted":
        count += 1
    return count


@pytest.mark.parametrize("keys", [10, 100])
def test_announced_keys_have_one_share_of_the_memory_together(keys: int) -> None:
    """The control is the old rule: each announced key has a share."""
    owners = dict.fromkeys(["owner", *(f"key {number}" for number in range(keys))], 0)
    found = []
    for standing in (frozenset({"owner"}), None):
        server = make_server(memory=4400, step_size=100)
        server.handle(OwnersChanged(owners, standing), 0.0)
        found.append(admitted_forwards(server, "owner"))
    print(f"{keys} keys: {found[0]} forwards of an honest owner, {found[1]} by the old rule")
    assert found[0] == 8 and found[1] == 1


def test_keys_without_standing_cannot_fill_a_step() -> None:
    owners = dict.fromkeys(["owner", *(f"key {number}" for number in range(10))], 0)
    server = make_server(memory=100_000, step_size=8)
    server.handle(OwnersChanged(owners, frozenset({"owner"})), 0.0)
    taken = sum(admitted_forwards(server, f"key {number}") for number in range(10))
    assert taken == 4 and admitted_forwards(server, "owner") == 4
    server.handle(OwnersChanged(owners), 0.0)
    free = make_server(memory=100_000, step_size=8)
    free.handle(OwnersChanged(owners), 0.0)
    taken = sum(admitted_forwards(free, f"key {number}") for number in range(10))
    assert taken == 8 and admitted_forwards(free, "owner") == 0, "the control: the old rule"


def test_owners_with_standing_are_invited_first() -> None:
    server = make_server(memory=100_000, step_size=1)
    server.handle(OwnersChanged({"owner": 0, "key": 0, "last": 0}, frozenset({"owner", "last"})), 0.0)
    server.ask(make_task(0), 0.0)
    for owner in ("key", "last"):
        assert server.ask(make_task(1, owner=owner), 0.0)[0].kind == "busy"
    actions = server.handle(ReleasedBy("owner", (0,)), 0.0)
    assert [action.owner for action in actions if isinstance(action, Invite)] == ["last"]
