"""Batches that a call can take, patience that ends, and nothing left of peers that are gone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, cast

import pytest

from node.daemon.peers import peer_rpc
from node.daemon.peers.peer_rpc import MAX_BATCH_BYTES, MAX_BATCH_MESSAGES, MAX_QUEUED, Outbox
from protocol.errors import LimitError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from tests.node.small_run import until


class Receiver:
    """What the post calls: it takes all, answers, refuses, cannot be reached, or does not end."""

    def __init__(self) -> None:
        self.batches: list[tuple[PeerId, list[str]]] = []
        self.answers: list[tuple[PeerId, list[Signed]]] = []
        self.given_up: list[tuple[PeerId, str]] = []
        self.faults: list[BaseException] = []
        self.setbacks: list[str] = []
        self.lines: list[str] = []
        self.attempts = 0
        self.open = asyncio.Event()
        self.open.set()
        self.fault: Callable[[], BaseException | None] = lambda: None
        self.post = Outbox(cast(Any, self), self.receive, self.suspect, self, cast(Any, self))

    def record_recovered(self, reason: str, line: str) -> None:
        self.setbacks.append(reason)
        self.lines.append(line)

    async def deliver(self, peer: PeerId, statements: Sequence[Signed], seconds: float) -> Iterable[Signed]:
        self.attempts += 1
        await self.open.wait()
        fault = self.fault()
        if fault is not None:
            raise fault
        self.batches.append((peer, [signed.kind for signed in statements]))
        return [Signed(kind="answer")]

    def receive(self, peer: PeerId, statements: Iterable[Signed]) -> None:
        self.answers.append((peer, list(statements)))

    def fail(self, error: BaseException) -> None:
        self.faults.append(error)

    def suspect(self, peer: PeerId, reason: str) -> None:
        self.given_up.append((peer, reason))

    @property
    def workers(self) -> int:
        return len(self.post._workers) + len(self.post._queues)


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    monkeypatch.setattr(peer_rpc, "RETRY_DELAYS", (0.001, 0.001, 0.001))
    made = Receiver()
    yield made
    await made.post.stop()
    assert made.workers == 0


async def test_in_order_in_batches_with_answers(receiver: Receiver) -> None:
    for number in range(40):
        receiver.post.send(["a"], Signed(kind=str(number)))
    await until(lambda: not receiver.workers)
    assert [kind for _, batch in receiver.batches for kind in batch] == [str(number) for number in range(40)]
    assert max(len(batch) for _, batch in receiver.batches) == MAX_BATCH_MESSAGES
    assert receiver.answers[0] == ("a", [Signed(kind="answer")])


async def test_no_batch_is_larger_than_a_call(receiver: Receiver) -> None:
    receiver.open.clear()
    for number in range(6):
        receiver.post.send(["a"], Signed(kind=str(number), body=bytes(MAX_BATCH_BYTES // 3)))
    receiver.post.send(["a"], Signed(kind="too large", body=bytes(MAX_BATCH_BYTES)))
    receiver.open.set()
    await until(lambda: not receiver.workers)
    sizes = [len(batch) for _, batch in receiver.batches]
    assert sum(sizes) == 6 and max(sizes) == 2
    assert not receiver.given_up


async def test_all_that_was_given_up_is_counted_with_what_was_tried(receiver: Receiver) -> None:
    receiver.fault = lambda: UnreachableError("lost")
    for number in range(MAX_BATCH_MESSAGES + 5):
        receiver.post.send(["a"], Signed(kind=str(number)))
    await until(lambda: bool(receiver.given_up))
    assert receiver.lines == [f"dropped {MAX_BATCH_MESSAGES + 5} messages for a: lost"]


async def test_a_lost_call_is_made_again(receiver: Receiver) -> None:
    receiver.fault = lambda: UnreachableError("lost") if receiver.attempts < 3 else None
    receiver.post.send(["a"], Signed(kind="x"))
    await until(lambda: not receiver.workers)
    assert receiver.batches == [("a", ["x"])] and not receiver.given_up


async def test_who_cannot_be_reached_is_given_up_once_with_all_that_waits(receiver: Receiver) -> None:
    receiver.fault = lambda: UnreachableError("no route")
    for number in range(50):
        receiver.post.send(["a"], Signed(kind=str(number)))
    await until(lambda: not receiver.workers)
    assert receiver.given_up == [("a", "no route")] and receiver.setbacks == ["not delivered"]
    assert receiver.attempts == 1 + len(peer_rpc.RETRY_DELAYS)
    receiver.fault = lambda: None
    receiver.post.send(["a"], Signed(kind="later"))
    await until(lambda: bool(receiver.batches))
    assert receiver.batches == [("a", ["later"])]


async def test_who_refuses_is_there(receiver: Receiver) -> None:
    receiver.fault = lambda: LimitError("no") if receiver.attempts == 1 else None
    receiver.post.send(["a"], Signed(kind="refused"))
    await until(lambda: receiver.attempts == 1)
    receiver.post.send(["a"], Signed(kind="taken"))
    await until(lambda: not receiver.workers)
    assert not receiver.given_up and receiver.batches == [("a", ["taken"])]
    assert receiver.setbacks == ["not accepted"]


async def test_a_frozen_peer_holds_up_nobody_and_its_queue_ends(receiver: Receiver) -> None:
    async def deliver(peer: PeerId, statements: Sequence[Signed], seconds: float) -> Iterable[Signed]:
        if peer == "frozen":
            await asyncio.Event().wait()
        return await take(peer, statements, seconds)

    take = receiver.deliver
    receiver.deliver = deliver  # type: ignore[method-assign]
    for number in range(MAX_QUEUED + MAX_BATCH_MESSAGES + 2):
        receiver.post.send(["frozen", "a"], Signed(kind=str(number)))
        await asyncio.sleep(0)
    await until(lambda: sum(len(batch) for _, batch in receiver.batches) == MAX_QUEUED + MAX_BATCH_MESSAGES + 2)
    assert receiver.given_up == [("frozen", "its queue is full")]


async def test_forgetting_ends_the_worker_even_from_within(receiver: Receiver) -> None:
    receiver.open.clear()
    receiver.post.send(["a", "b"], Signed(kind="x"))
    await until(lambda: receiver.attempts == 2)
    receiver.post.drop_peer("a")
    assert set(receiver.post._workers) == {"b"}
    receiver.suspect = lambda peer, reason: receiver.post.drop_peer(peer)  # type: ignore[method-assign]
    receiver.fault = lambda: UnreachableError("gone")
    receiver.open.set()
    await until(lambda: not receiver.workers)
    assert not receiver.faults


async def test_a_fault_of_our_own_is_told_and_does_not_stop_the_post(receiver: Receiver) -> None:
    receiver.fault = lambda: KeyError("a bug") if receiver.attempts == 1 else None
    receiver.post.send(["a"], Signed(kind="x"))
    await until(lambda: bool(receiver.faults))
    assert isinstance(receiver.faults[0], KeyError)
    receiver.post.send(["a"], Signed(kind="y"))
    await until(lambda: bool(receiver.batches))
