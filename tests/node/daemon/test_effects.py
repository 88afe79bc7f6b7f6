"""Rounds with real stores and arithmetic, and messages that arrive at once."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from node.daemon import effects, inbox
from protocol.blobs.blob import Blob
from protocol.conduct import NOT_SERVED
from protocol.consensus.chain import ChainHead, ChainLog
from protocol.consensus.events import MembershipChanged
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import PartBlob
from protocol.electorate import Electorate
from protocol.errors import StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from tests.node.daemon.loopback_network import LoopbackNetwork
from tests.node.small_run import (
    PEERS,
    CopyingFetcher,
    contribution_of,
    kinds,
    payload,
    stated,
    until,
)


@pytest.mark.parametrize("exchange", ["gather", "butterfly"])
async def test_all_decide_the_same_and_can_apply_it(
    tables: list[LoopbackNetwork], tmp_path: Path, exchange: str
) -> None:
    table = LoopbackNetwork(tmp_path, 4, exchange)
    tables.append(table)
    table.begin()
    table.offer(0, 1, 2, 3)
    assert len(await table.wait_until_decided(0, 1, 2, 3)) == 1
    commit = table[0].decided[0].body
    assert len(commit.contributions) == 4
    assert all(table[0].store.has(blob.digest) for blob in commit.blobs)
    assert not table[0].session.is_open and len(table[0].decided) == 1


async def test_what_is_decided_was_foreseen_by_all_who_had_all_of_it(table: LoopbackNetwork) -> None:
    table.begin()
    table[2].offer(parts=[table[2].store.put(b"\0" * len(payload(0)))])  # does not decode
    table.offer(0, 1)
    await table.wait_until_decided(0, 1, 2)
    for seat in table.peers.values():
        assert seat.state.foreseen[-1].content_digest == seat.decided[0].body.content_digest
        assert all(seat.store.has(blob.digest) for blob in seat.state.foreseen[0].blobs)


async def test_what_is_summed_here_comes_before_the_sums_of_others_and_part_after_part(
    tables: list[LoopbackNetwork], tmp_path: Path
) -> None:
    table = LoopbackNetwork(tmp_path, 3, "butterfly")
    tables.append(table)
    table.begin()
    table.offer(0, 1, 2)
    await table.wait_until_decided(0, 1, 2)
    commit, firsts = table[0].decided[0].body, set[int]()
    for seat in table.peers.values():
        own = {blob: part for entry in commit.contributions for part, blob in enumerate(entry.body.parts)}
        sums = {blob: part for part, blob in enumerate(commit.parts)}
        turns = seat.fetcher.turns
        assert turns.keys() & own.keys() and turns.keys() & sums.keys()
        parts, most = len(commit.parts), table.terms.parts
        reduced = {blob for blob in turns.keys() & own.keys() if turns[blob] < most}
        assert all(turns[blob] == own[blob] for blob in reduced)
        assert all(turns[blob] == 2 * most + own[blob] for blob in turns.keys() & own.keys() - reduced), "checks"
        first = min(own[blob] for blob in reduced)
        for blob in turns.keys() & sums.keys():
            assert turns[blob] == table.terms.parts + (sums[blob] - first) % parts
        assert max(own.values()) < table.terms.parts
        firsts.add(first)
    assert len(firsts) > 1, "they begin at different parts"


async def test_a_silent_peer_is_left_out(table: LoopbackNetwork) -> None:
    table.begin()
    table.offer(0, 1)
    assert len(await table.wait_until_decided(0, 1)) == 1
    assert len(table[0].decided[0].body.contributions) == 2


async def test_whose_message_is_left_out_is_told_so_before_the_round_is_closed(table: LoopbackNetwork) -> None:
    table.begin()
    table[2].offer(parts=[table[2].store.put(b"\0" * len(payload(0)))])  # does not decode
    table.offer(0, 1)
    await table.wait_until_decided(0, 1, 2)
    assert all((PEERS[2].peer_id, "left out") in seat.state.skipped for seat in table.peers.values())


@pytest.mark.parametrize("reason", ["not served", "does not decode"])
async def test_owner_of_what_cannot_be_used_is_struck_before_the_round_ends(
    tables: list[LoopbackNetwork], tmp_path: Path, reason: str
) -> None:
    table = LoopbackNetwork(tmp_path, 4, "gather")
    tables.append(table)
    table.begin()
    garbled = b"\0" * len(payload(0))
    ghost = Blob.of(garbled) if reason == "not served" else table[3].store.put(garbled)
    table[3].offer(parts=[ghost])
    culprit = PEERS[3].peer_id
    await until(lambda: all((culprit, reason) in table[seat].state.skipped for seat in range(3)))
    for seat in range(3):
        assert not table[seat].decided
        assert table[seat].loop.conduct.conduct.serving.struck(0, table.peers) == {culprit: NOT_SERVED}
    table.offer(0, 1, 2)
    await table.wait_until_decided(0, 1, 2)
    assert len(table[0].decided[0].body.contributions) == 3


async def test_a_blob_that_is_late_is_counted_and_asked_for_again(
    table: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, tried = CopyingFetcher.fetch, set[Blob]()

    async def late(
        self: CopyingFetcher,
        blob: Blob,
        sources: Callable[[], Sequence[PeerId]],
        deadline: float,
        turn: int,
        **options: Any,
    ) -> None:
        if blob not in tried:
            tried.add(blob)
            raise UnreachableError("nobody has it yet")
        await fetch(self, blob, sources, deadline)

    monkeypatch.setattr(CopyingFetcher, "fetch", late)
    monkeypatch.setattr(effects, "RETRY_SECONDS", 0.01)
    table.begin()
    table.offer(0, 1, 2)
    await table.wait_until_decided(0, 1, 2)
    assert len(table[0].decided[0].body.contributions) == 3
    setbacks = [reason for seat in table.peers.values() for reason, _ in seat.setbacks]
    assert setbacks == ["blob late"] * len(tried)


async def test_what_does_not_decode_is_never_held(table: LoopbackNetwork) -> None:
    table.begin()
    bad = table[2].store.put(b"\0" * len(payload(0)))
    table[2].offer(parts=[bad])
    table.offer(0, 1)
    await table.wait_until_decided(0, 1)
    assert [entry.sender for entry in table[0].decided[0].body.contributions] == sorted(
        [PEERS[0].peer_id, PEERS[1].peer_id]
    )
    held = [signed for seat in (table[0], table[1]) for signed in seat.sent if signed.kind == "holding"]
    assert held and not any(bad.digest in signed.body for signed in held)
    assert {reason for reason, _ in table[0].setbacks} == {"blob missing"}
    assert "continues here without blob" in table[0].setbacks[0][1]


async def test_a_twin_of_another_size_keeps_nobody_from_what_it_names(table: LoopbackNetwork) -> None:
    """Whichever of the two comes first, the other one's blob is another wish."""
    table.begin()
    (blob,) = table[1].parts()
    table[2].offer(parts=[Blob(blob.digest, blob.size - 1)])
    await until(lambda: len(table[0].fetcher.asked) == 1)
    table[1].offer(parts=[blob])
    machine = table[0].machine
    await until(lambda: PartBlob(blob, 0) in machine._knowledge.held_parts)
    table.offer(0)
    await table.wait_until_decided(0, 1)
    for seat in (table[0], table[1]):
        contributions = seat.decided[0].body.contributions
        assert {entry.sender for entry in contributions} == {PEERS[0].peer_id, PEERS[1].peer_id}


async def test_one_blob_as_several_parts_is_checked_as_each(tables: list[LoopbackNetwork], tmp_path: Path) -> None:
    table = LoopbackNetwork(tmp_path, 2, "butterfly", parts=4)
    tables.append(table)
    table.begin()
    sizes = {stop - start for start, stop in table.bounds}
    assert len(sizes) == 1
    table[1].offer(parts=[table[1].store.put(payload(5, *sizes))] * len(table.bounds))
    table.offer(0)
    assert len(await table.wait_until_decided(0, 1)) == 1
    assert len(table[0].decided[0].body.contributions) == 2


async def test_who_comes_late_is_told_the_decision(table: LoopbackNetwork) -> None:
    table.unreachable = {PEERS[2].peer_id}
    table.begin()
    table.offer(0, 1)
    await table.wait_until_decided(0, 1)
    table.unreachable = set()
    table.offer(2)
    assert len(await table.wait_until_decided(0, 1, 2)) == 1


async def test_a_decision_too_large_for_an_answer_goes_by_post(
    table: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_DECISION_REPLY_BYTES", 100)
    answers: list[list[Signed]] = []
    receiver = table[0].receiver
    receive = receiver.receive

    def noted(sender: PeerId, envelopes: Iterable[Signed]) -> list[Signed]:
        answers.append(receive(sender, envelopes))
        return answers[-1]

    monkeypatch.setattr(receiver, "receive", noted)
    table.unreachable = {PEERS[2].peer_id}
    table.begin()
    table.offer(0, 1)
    await table.wait_until_decided(0, 1)
    table.unreachable = set()
    table.offer(2)
    assert len(await table.wait_until_decided(0, 1, 2)) == 1
    assert answers and not any(answers)


async def test_only_the_oldest_decision_is_answered(table: LoopbackNetwork) -> None:
    peer = table[0]
    for number, kind in ((3, "three"), (4, "four")):
        peer.session._buffer.record_decision(number, (Signed(kind=kind),), (), 0.0)
    heads = [ChainHead(number, bytes(32), 0) for number in (4, 3)]
    asked = [stated(PEERS[1], contribution_of(head, table[1].parts())).signed for head in heads]
    assert kinds(peer.receiver.receive(PEERS[1].peer_id, asked)) == ["three"]


async def test_the_end_of_a_round_ends_its_fetches_and_its_timer(table: LoopbackNetwork) -> None:
    table.begin()
    peer, wanted = table[0], Blob.of(b"nobody has it")
    peer.fetch(PartBlob(wanted, 0), PEERS[1].peer_id)
    await until(lambda: table[0].fetcher.under_way == 1)
    assert peer.effects._timer is not None
    peer.close()
    await until(lambda: table[0].fetcher.under_way == 0)
    assert peer.effects._timer is None and not peer.round_effects._tasks and not peer.session.is_open
    peer.begin()
    peer.fetch(PartBlob(wanted, 0), PEERS[1].peer_id)
    await until(lambda: table[0].fetcher.under_way == 1)  # a wish that died with its round is a new wish


async def test_a_fetch_that_is_cancelled_before_it_began_is_wanted_again(table: LoopbackNetwork) -> None:
    table.begin()
    peer, wanted = table[0], Blob.of(b"nobody has it")
    peer.fetch(PartBlob(wanted, 0), PEERS[1].peer_id)
    peer.close()
    peer.begin()
    peer.fetch(PartBlob(wanted, 0), PEERS[1].peer_id)
    await until(lambda: table[0].fetcher.under_way == 1)


async def test_a_blob_that_is_damaged_on_our_disk_is_fetched_again(
    table: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "RETRY_SECONDS", 0.01)
    blob = table[1].parts()[0]
    table.begin()
    table[0].store.put(table[1].store.read(blob.digest))
    table[0].store.path(blob.digest).write_bytes(b"rotten")
    table[1].offer()
    table.offer(0, 2)
    await table.wait_until_decided(0)
    assert blob in table[0].decided[0].body.blobs
    assert table[0].store.read(blob.digest)


async def test_a_full_disk_ends_the_fetch_and_not_the_round(
    table: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any, **options: Any) -> None:
        raise StorageError("no space left; free some")

    monkeypatch.setattr(table[0].fetcher, "fetch", full)
    table.begin()
    table.offer(0, 1, 2)
    await table.wait_until_decided(1, 2)
    assert all("no space left" in line for _, line in table[0].setbacks) and not table[0].broken
    assert table[0].setbacks[0][0] == "blob missing"


async def test_a_fault_of_our_own_is_told(
    table: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)

    async def broken(*_: Any, **options: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(table[0].fetcher, "fetch", broken)
    table.begin()
    table[0].fetch(PartBlob(Blob.of(b"x"), 0), PEERS[1].peer_id)
    await until(lambda: bool(table[0].broken))
    assert isinstance(table[0].broken.pop(), KeyError) and "broke" in caplog.text


async def test_what_an_action_causes_waits_until_all_actions_are_carried_out(table: LoopbackNetwork) -> None:
    """A peer found unreachable while we send changes the members in the midst of it."""
    seat, depth, deepest = table[0], 0, 0
    handle, send = seat.effects.handle, seat.send

    def counted(event: Any) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        handle(event)
        depth -= 1

    def unreachable(peers: Iterable[PeerId], signed: Signed) -> None:
        send(peers, signed)
        seat.members_changed()

    seat.inbox.attach(counted)
    seat.send = unreachable  # type: ignore[method-assign]
    table.begin()
    table.offer(0, 1, 2)
    assert len(await table.wait_until_decided(0, 1, 2)) == 1
    assert deepest == 1


async def test_a_round_hears_of_its_members_when_they_change(
    table: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[MembershipChanged] = []
    handle_all = RoundMachine.handle_all

    def noted(self: RoundMachine, events: Sequence[Any], now: float) -> Any:
        heard.extend(event for event in events if isinstance(event, MembershipChanged))
        return handle_all(self, events, now)

    monkeypatch.setattr(RoundMachine, "handle_all", noted)
    peer = table[0]
    peer.begin()
    for resting in ((), (), (PEERS[1].peer_id,), (PEERS[1].peer_id,), ()):
        table[0].resting = {*resting}
        peer.members_changed()
    assert [len(live.resting) for live in heard] == [0, 1, 0]
    peer.close()
    peer.begin()
    assert len(heard) == 4, "another machine knows nobody yet"


async def test_votes_are_remembered_from_round_to_round_and_over_a_close(table: LoopbackNetwork) -> None:
    table.begin()
    peer = table[0]
    peer.close()
    peer.begin([])
    assert peer.machine.last_seen.keys() == table.peers.keys()


async def test_decisions_of_another_chain_are_forgotten(table: LoopbackNetwork) -> None:
    peer = table[0]
    for number in (3, 4, 5):
        peer.session._buffer.record_decision(number, (Signed(kind=str(number)),), (), 0.0)
    peer.loop.chain.switch_to(ChainHead(4, bytes(32), 0), ChainLog(Electorate.at_genesis()))
    peer.begin()
    late = [
        stated(PEERS[1], contribution_of(ChainHead(number, bytes(32), 0), table[1].parts())) for number in (3, 4, 5)
    ]
    assert [peer.session._buffer.is_late(statement) for statement in late] == [True, False, False]


async def test_a_blob_is_checked_as_what_it_was_ordered_as(tables: list[LoopbackNetwork], tmp_path: Path) -> None:
    """Whoever named it may have named another one since: what was heard last does not say what this one is."""
    table = LoopbackNetwork(tmp_path, 2, "butterfly", parts=5)
    tables.append(table)
    table.begin()
    sizes = [stop - start for start, stop in table.bounds]
    assert sizes[0] != sizes[2], "otherwise the first part's check would do for this one"
    blob = table[1].store.put(payload(90, sizes[2]))
    peer, machine = table[0], table[0].machine
    assert not peer.session._messages
    peer.fetch(PartBlob(blob, 2), PEERS[1].peer_id, is_reduced=True)
    await until(lambda: PartBlob(blob, 2) in machine._knowledge.held_parts)
    assert not table[0].setbacks


async def test_a_blob_of_another_part_is_not_held(tables: list[LoopbackNetwork], tmp_path: Path) -> None:
    table = LoopbackNetwork(tmp_path, 2, "butterfly", parts=5)
    tables.append(table)
    table.begin()
    first = table[1].store.put(payload(90, table.bounds[0][1] - table.bounds[0][0]))
    table[0].fetch(PartBlob(first, 2), PEERS[1].peer_id, is_reduced=True)
    await until(lambda: bool(table[0].setbacks))
    assert "does not decode" in table[0].setbacks[0][1]
