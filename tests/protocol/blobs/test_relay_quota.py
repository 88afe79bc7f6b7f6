"""Blobs held for others are limited per peer and in total, and released with their round."""

import pytest

from protocol.blobs.blob import Blob
from protocol.blobs.relay_quota import RelayQuota
from protocol.errors import LimitError


def blob(seed: int, size: int = 10) -> Blob:
    return Blob(bytes([seed]) * 32, size)


def test_bytes_are_limited_per_peer_and_in_total() -> None:
    quota = RelayQuota(max_bytes=50, max_bytes_per_peer=20, max_blobs_per_peer=9)
    quota.reserve("ada", blob(1), 7)
    quota.reserve("ada", blob(2), 7)
    with pytest.raises(LimitError, match="ada has 2 blobs of 20 bytes"):
        quota.reserve("ada", blob(3), 7)
    quota.reserve("ada", blob(2), 7)  # already counted
    quota.reserve("bob", blob(2), 7)  # so it costs bob nothing
    quota.reserve("bob", blob(4, 20), 7)
    with pytest.raises(LimitError, match="40 bytes are carried for others"):
        quota.reserve("eve", blob(5, 11), 7)
    assert quota.reserved_bytes == 40 and len(quota.digests()) == 3


def test_number_of_blobs_per_peer_is_limited() -> None:
    quota = RelayQuota(max_bytes=50, max_bytes_per_peer=20, max_blobs_per_peer=2)
    for seed in (1, 2):
        quota.reserve("ada", blob(seed, 1), 7)
    with pytest.raises(LimitError):
        quota.reserve("ada", blob(3, 1), 7)


def test_reservations_are_released_with_their_round() -> None:
    quota = RelayQuota(max_bytes=50, max_bytes_per_peer=20, max_blobs_per_peer=9)
    quota.reserve("ada", blob(1), 7)
    quota.reserve("ada", blob(2), 8)
    quota.release_before(8)
    assert quota.digests() == {blob(2).digest}
    quota.reserve("ada", blob(3), 8)
    assert quota.reserved_bytes == 20
