"""What a start finds on its disk: the trainer's own state, and the message that was on its way."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from node.arena import RESIDUAL, Arena, Contents
from node.channel import Message
from node.checkpoints.checkpoint import Checkpoint
from node.daemon.metrics import Setback
from node.daemon.offer_file import OfferFile
from node.daemon.offers import Offer, Offers, Past, Sent
from node.daemon.resumption import restore_inner, restored_offers
from optim.recipes import compose
from protocol.errors import CheckpointError, StorageError
from protocol.rounds.chain import Head
from tests.node.daemon.kept import OUTBOX, World
from tests.node.small_run import PEERS, PROGRAM, commit_of, program_of


def restored(saved: Checkpoint | None, world: World, setbacks: list[Setback] | None = None) -> Offers:
    said: list[Setback] = [] if setbacks is None else setbacks
    return restored_offers(saved, PROGRAM, world.arena, world.store, world.sent, lambda reason, _: said.append(reason))


async def test_trainer_and_message_come_back_from_disk(world: World, tmp_path: Path) -> None:
    world.snapshot(outstanding=3)
    await world.keeper.save_now(world.replica, Offers(PROGRAM, (2, "included")))
    found, other = world.loaded(), World(tmp_path / "other")
    restore_inner(found, other.arena)
    snapshot = other.arena.read_snapshot()
    place = [name for name, _ in world.arena.contents.vectors].index(RESIDUAL)
    assert snapshot is not None and snapshot.vectors[RESIDUAL][0] == place
    assert bytes(other.arena.outbox[: len(OUTBOX)]) == OUTBOX
    offers = restored(found, other)
    assert offers.current is not None and offers.current.message.tokens == 100
    assert [other.store.read(part.digest) for part in offers.current.parts] == [b"first", b"second"]
    # A round has taken it while we were away: settled now, and not offered again.
    commit = commit_of(Head(3, bytes(32), 0), {1: offers.current.parts}).body
    assert offers.settle(PEERS[1].peer_id, commit) == "included"
    assert offers.is_known(Message(round=3, sizes=(5, 6), tokens=100, steps=5, loss=3.0))
    other.arena.close()


async def test_a_state_of_another_method_is_refused(world: World) -> None:
    world.snapshot()
    await world.keeper.save_now(world.replica, Offers(PROGRAM))
    found = world.loaded()
    for recipe in ("data-parallel", "local-adam"):
        arena = Arena.create(Contents.of(program_of(compose(recipe))))
        with pytest.raises(CheckpointError, match="the state of another method"):
            restore_inner(found, arena)
        assert arena.read_snapshot() is None
        arena.close()


@pytest.mark.parametrize(("outstanding", "decided"), [(None, None), (2, (2, "excluded"))])
async def test_what_is_decided_or_absent_does_not_come_back(
    world: World, outstanding: int | None, decided: tuple[int, Any] | None
) -> None:
    world.snapshot(outstanding)
    await world.keeper.save_now(world.replica, Offers(PROGRAM, decided))
    offers = restored(world.loaded(), world)
    assert offers.current is None and offers.decided == decided


async def test_a_checkpoint_without_a_trainer(world: World) -> None:
    await world.keeper.save_now(world.replica, Offers(PROGRAM))
    found = world.loaded()
    restore_inner(found, world.arena)
    assert world.arena.read_snapshot() is None
    assert restored(found, world).current is None


def test_a_last_message_whose_bytes_are_gone_is_not_offered_and_said(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.snapshot()
    asyncio.run(world.keeper.save_now(world.replica, Offers(PROGRAM)))
    found, setbacks = world.loaded(), list[Setback]()
    restore_inner(found, world.arena)
    parts = (world.store.put(b"first"), world.store.put(b"second"))
    message = Message(serial=1, round=found.round, sizes=(5, 6), tokens=1, steps=1, loss=1.5)
    world.sent.save(Sent(Offer(message, parts), ()))
    world.store.discard(parts[1].digest)
    assert restored(found, world, setbacks).current is None
    assert setbacks == ["message gone"]
    world.arena.close()


def test_the_last_message_is_found_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    offer = Offer(Message(serial=4, round=7, sizes=(5, 6), tokens=1, steps=1, loss=1.5), (world.store.put(b"part"),))
    sent = Sent(offer, (Past(offer, 6, "included", "excluded"), Past(offer, 7, "excluded", carrier=4)))
    assert world.sent.load() is None
    world.sent.save(sent)
    assert OfferFile(world.folder.offer).load() == sent
    world.folder.offer.write_text(world.folder.offer.read_text()[:-9])
    with pytest.raises(StorageError, match="damaged"):
        world.sent.load()
    assert restored(None, world).current is None, "a trainer that begins anew counts its messages anew"
    assert world.sent.load() is None
    world.arena.close()
