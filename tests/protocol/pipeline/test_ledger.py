import random

import pytest

from protocol import murmur_pb2 as wire
from protocol.errors import LimitError, PeerFault
from protocol.identity import Identity
from protocol.pipeline import ledger as ledger_module
from protocol.pipeline.ledger import MAX_OWNERS, Ledger
from protocol.pipeline.messages import MAX_SERIAL, Key

OWNERS = sorted(Identity.create().peer_id for _ in range(3))
A, B, _ = OWNERS


def random_keys(seed: int) -> set[Key]:
    chance = random.Random(seed)
    return {Key(chance.choice(OWNERS), chance.choice([chance.randrange(600), MAX_SERIAL])) for _ in range(200)}


@pytest.mark.parametrize("seed", range(20))
def test_a_ledger_is_a_set_of_microbatches(seed: int) -> None:
    first, second = random_keys(seed), random_keys(seed + 1000)
    one, other = Ledger(first), Ledger(second)
    assert set(one) == first and list(one) == sorted(first) and len(one) == len(first)
    assert set(one | other) == first | second
    assert set(one & other) == first & second
    assert set(one - other) == first - second == set(other.missing(one))
    assert one.is_disjoint(other) == first.isdisjoint(second)
    assert all(key in one for key in first) and all((key in one) == (key in first) for key in second)
    assert Ledger.from_bytes(one.to_bytes()) == one
    assert not one - one and (one - one) == Ledger()


def test_a_random_half_takes_two_bits_for_each_microbatch() -> None:
    chance = random.Random(1)
    keys = [Key(A, serial) for serial in range(100_000) if chance.random() < 0.5]
    assert len(Ledger(keys).to_bytes()) < 2.2 * len(keys) / 8


def test_scattered_serials_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_BLOCKS", 4)
    ledger = Ledger(Key(A, 256 * number) for number in range(4))
    ledger.add(Key(A, 1))
    with pytest.raises(LimitError):
        ledger.add(Key(A, 10**6))
    with pytest.raises(LimitError):
        ledger.add(Key(B, 0))


def owned(owner: str, blocks: list[int], bits: bytes) -> wire.OwnedSerials:
    return wire.OwnedSerials(owner=owner, blocks=blocks, bits=bits)


ONE = (1).to_bytes(32, "little")


@pytest.mark.parametrize(
    "owners",
    [
        [owned("nobody", [0], ONE)],
        [owned(A, [0], ONE), owned(A, [1], ONE)],
        [owned(B, [0], ONE), owned(A, [1], ONE)],
        [owned(A, [1, 0], ONE + ONE)],
        [owned(A, [0, 0], ONE + ONE)],
        [owned(A, [0], bytes(32))],
        [owned(A, [0], ONE + ONE)],
        [owned(A, [], b"")],
        [owned(A, [2**60], ONE)],
    ],
)
def test_bytes_in_another_form_are_refused(owners: list[wire.OwnedSerials]) -> None:
    with pytest.raises(PeerFault):
        Ledger.from_bytes(wire.SerialLedger(owners=owners).SerializeToString())


def test_bytes_that_do_not_parse_or_are_too_many_are_refused() -> None:
    for content in (b"\xff", bytes(ledger_module.MAX_LEDGER_BYTES + 1)):
        with pytest.raises(PeerFault):
            Ledger.from_bytes(content)
    assert MAX_OWNERS == 1024
