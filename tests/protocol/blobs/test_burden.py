"""What is held for others is bounded, for each and for all, and goes with its round."""

import pytest

from protocol.blobs.blob import Blob
from protocol.blobs.burden import Burden
from protocol.errors import LimitError


def blob(seed: int, size: int = 10) -> Blob:
    return Blob(bytes([seed]) * 32, size)


def test_one_peer_may_have_so_much_carried_and_all_together_so_much() -> None:
    held = Burden(most=50, most_each=20, blobs_each=9)
    held.take("ada", blob(1), 7)
    held.take("ada", blob(2), 7)
    with pytest.raises(LimitError, match="ada has 2 blobs of 20 bytes"):
        held.take("ada", blob(3), 7)
    held.take("ada", blob(2), 7)  # it is there already
    held.take("bob", blob(2), 7)  # and costs bob nothing
    held.take("bob", blob(4, 20), 7)
    with pytest.raises(LimitError, match="40 bytes are carried for others"):
        held.take("eve", blob(5, 11), 7)
    assert held.size == 40 and len(held.digests()) == 3


def test_many_small_ones_are_too_many() -> None:
    held = Burden(most=50, most_each=20, blobs_each=2)
    for seed in (1, 2):
        held.take("ada", blob(seed, 1), 7)
    with pytest.raises(LimitError):
        held.take("ada", blob(3, 1), 7)


def test_a_round_that_is_over_takes_along_what_it_had_carried() -> None:
    held = Burden(most=50, most_each=20, blobs_each=9)
    held.take("ada", blob(1), 7)
    held.take("ada", blob(2), 8)
    held.drop_before(8)
    assert held.digests() == {blob(2).digest}
    held.take("ada", blob(3), 8)
    assert held.size == 20
