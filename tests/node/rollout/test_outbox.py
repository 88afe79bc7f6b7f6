"""A rollout peer numbers its groups without gaps, pauses in time, and goes on at the same group after its death."""

from pathlib import Path

import pytest

from node.rollout.outbox import COMPACT_FACTOR, GroupJournal, GroupOutbox, HeldGroup
from protocol.identity import Identity
from protocol.rollout_groups import DrawnAnswer, GroupLimits, Place, RolloutGroup, sign_group

RUN = "ab" * 32
ME = Identity.create()
LIMITS = GroupLimits(answers=2, answer_tokens=4, vocabulary=16, serials=6)


def group(place: Place) -> HeldGroup:
    answer = DrawnAnswer((1, place.serial), (-0.5, -1.0))
    return HeldGroup(place, sign_group(ME, RUN, RolloutGroup(place.round, place.serial, "cpu", (answer, answer))))


def filled(outbox: GroupOutbox, count: int) -> list[Place]:
    places = outbox.next_places(count)
    outbox.add(map(group, places))
    return places


def test_serials_have_no_gaps_and_a_round_begins_at_zero() -> None:
    outbox = GroupOutbox(limit=6, max_age=2)
    outbox.begin_round(3)
    assert filled(outbox, 2) + filled(outbox, 2) == [Place(3, serial) for serial in range(4)]
    outbox.begin_round(4)
    assert filled(outbox, 1) == [Place(4, 0)]
    with pytest.raises(ValueError, match="does not follow"):
        outbox.add([group(Place(4, 2))])


def test_peer_pauses_until_a_trainer_has_fetched_what_it_made() -> None:
    outbox = GroupOutbox(limit=6, max_age=9)
    outbox.begin_round(1)
    assert len(filled(outbox, 4)) == 4
    outbox.begin_round(2)
    assert len(filled(outbox, 4)) == 2, "six groups wait, of two rounds"
    assert outbox.next_places(1) == []
    assert len(list(outbox.serve("trainer", Place(1, 3)))) == 3
    assert outbox.waiting == 3 and outbox.next_places(9) == [Place(2, 2), Place(2, 3), Place(2, 4)]


def test_round_has_a_bound_although_all_groups_are_fetched() -> None:
    outbox = GroupOutbox(limit=6, max_age=9)
    outbox.begin_round(1)
    filled(outbox, 6)
    list(outbox.serve("trainer", Place(1, 6)))
    assert outbox.waiting == 0 and outbox.next_places(1) == []
    outbox.begin_round(2)
    assert outbox.next_places(1) == [Place(2, 0)]


def test_round_of_fewer_steps_has_fewer_groups() -> None:
    outbox = GroupOutbox(limit=6, max_age=9)
    outbox.begin_round(1, 4)
    assert len(filled(outbox, 9)) == 4
    outbox.begin_round(2, 2)
    assert outbox.next_places(9) == [], "four groups wait"
    list(outbox.serve("trainer", Place(2, 0)))
    assert len(filled(outbox, 9)) == 2


def test_peer_lets_others_draw_too() -> None:
    outbox = GroupOutbox(limit=6, max_age=9)
    outbox.begin_round(1, 6, share=0.5)
    assert len(filled(outbox, 9)) == 3
    list(outbox.serve("trainer", Place(1, 3)))
    assert len(filled(outbox, 9)) == 3, "fetched groups make room, up to those of the round"
    list(outbox.serve("trainer", Place(1, 6)))
    assert outbox.next_places(9) == []
    outbox.begin_round(2, 6, share=0.01)
    assert len(filled(outbox, 9)) == 1


def test_groups_of_old_rounds_are_dropped_and_the_others_stay_for_a_trainer_that_comes_back() -> None:
    outbox = GroupOutbox(limit=6, max_age=1)
    for number in (1, 2, 3):
        outbox.begin_round(number)
        filled(outbox, 2)
    assert [held.place.round for held in outbox.groups] == [2, 2, 3, 3]
    assert len(list(outbox.serve("trainer", Place(3, 1)))) == 1
    assert len(list(outbox.serve("trainer", Place(2, 0)))) == 4, "its snapshot was older"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "groups.log"


def written(path: Path, count: int) -> list[HeldGroup]:
    journal = GroupJournal(path, RUN)
    assert journal.load(ME.peer_id, LIMITS) == []
    groups = [group(Place(5, serial)) for serial in range(count)]
    for number, each in enumerate(groups):
        journal.append([each], groups[: number + 1])
    return groups


def test_peer_goes_on_at_the_same_group_with_the_same_content(path: Path) -> None:
    groups = written(path, 3)
    held = GroupJournal(path, RUN).load(ME.peer_id, LIMITS)
    assert held == groups
    outbox = GroupOutbox(limit=6, max_age=2, held=held)
    outbox.begin_round(5)
    assert outbox.next_places(1) == [Place(5, 3)]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_journal_of_a_killed_writer_is_cut_after_its_last_whole_group(
    path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    groups = written(path, 3)
    path.write_bytes(path.read_bytes()[:-cut])
    assert GroupJournal(path, RUN).load(ME.peer_id, LIMITS) == groups[:2]
    assert "goes on after its first 2 groups" in caplog.text
    assert GroupJournal(path, RUN).load(ME.peer_id, LIMITS) == groups[:2], "it is whole again"


def test_damage_in_the_middle_keeps_what_is_before_it(path: Path) -> None:
    groups = written(path, 3)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert GroupJournal(path, RUN).load(ME.peer_id, LIMITS) == groups[:1]


@pytest.mark.parametrize("content", [b"", b"something else", b"\0" * 5000])
def test_file_of_another_kind_is_begun_again(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert written(path, 2) == GroupJournal(path, RUN).load(ME.peer_id, LIMITS)


def test_groups_of_another_key_or_another_run_are_not_ours(path: Path) -> None:
    written(path, 2)
    assert GroupJournal(path, RUN).load(Identity.create().peer_id, LIMITS) == []
    written(path, 2)
    assert GroupJournal(path, "cd" * 32).load(ME.peer_id, LIMITS) == []


def test_journal_does_not_grow_with_the_run(path: Path) -> None:
    journal, outbox = GroupJournal(path, RUN), GroupOutbox(limit=6, max_age=1)
    journal.load(ME.peer_id, LIMITS)
    for number in range(50):
        outbox.begin_round(number)
        made = [group(place) for place in outbox.next_places(6)]
        journal.append(made, [*outbox.groups, *made])
        outbox.add(made)
        list(outbox.serve("trainer", Place(number, 6)))
    most = sum(held.signed.ByteSize() + 12 for held in outbox.groups) + 100
    assert path.stat().st_size <= COMPACT_FACTOR * most
    assert GroupJournal(path, RUN).load(ME.peer_id, LIMITS)[-12:] == list(outbox.groups)
