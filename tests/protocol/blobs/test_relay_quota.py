"""What is held for others is bounded, for each and for all, and goes with its round."""

import pytest

from protocol.blobs.blob import Blob
from protocol.blobs.relay_quota import RelayQuota
from protocol.errors import LimitError


def blob(seed: int, size: int = 10) -> Blob:
    return Blob(bytes([seed]) * 32, size)


def test_one_peer_may_have_so_much_carried_and_all_together_so_much() -> None:
    held = RelayQuota(max_bytes=50, max_bytes_per_peer=20, max_blobs_per_peer=9)
    held.reserve("ada", blob(1), 7)
    held.reserve("ada", blob(2), 7)
    with pytest.raises(LimitError, match="ada has 2 blobs of 20 bytes"):
        held.reserve("ada", blob(3), 7)
    held.reserve("ada", blob(2), 7)  # it is there already
    held.reserve("bob", blob(2), 7)  # and costs bob nothing
    held.reserve("bob", blob(4, 20), 7)
    with pytest.raises(LimitError, match="40 bytes are carried for others"):
        held.reserve("eve", blob(5, 11), 7)
    assert held.reserved_bytes == 40 and len(held.digests()) == 3


def test_many_small_ones_are_too_many() -> None:
    held = RelayQuota(max_bytes=50, max_bytes_per_peer=20, max_blobs_per_peer=2)
    for seed in (1, 2):
        held.reserve("ada", blob(seed, 1), 7)
    with pytest.raises(LimitError):
        held.reserve("ada", blob(3, 1), 7)


def test_a_round_that_is_over_takes_along_what_it_had_carried() -> None:
    held = RelayQuota(max_bytes=50, max_bytes_per_peer=20, max_blobs_per_peer=9)
    held.reserve("ada", blob(1), 7)
    held.reserve("ada", blob(2), 8)
    held.release_before(8)
    assert held.digests() == {blob(2).digest}
    held.reserve("ada", blob(3), 8)
    assert held.reserved_bytes == 20
