"""How fast averaging in groups brings peers together, and what it costs each, for up to ten thousand.

For values that are spread at random, what one round of disjoint groups leaves of their variance is known:

    random groups of g   (n - g) / (g (n - 1)) of it in every round: the mean of g drawn without replacement
    exponential          a half; after log2 n rounds nothing, where n is a power of two
    ring                 a half in the first round; after k more C(2k, k) / 4^k of that; of the longest wave each of
                         these leaves cos^2(2 pi / n), which for thousands of peers is nearly all
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.consensus.topology import Groups, Pattern, groups_by_peer
from tests.simulation.virtual.network import RUN_ID

BLOB_BYTES = 1_000_000
Values = NDArray[np.float64]


@pytest.fixture(autouse=True)
def clear_group_cache() -> Iterator[None]:
    """Groups of ten thousand are not kept for the tests that follow."""
    yield
    groups_by_peer.cache_clear()


class AveragingPeers:
    """`values`: one a peer. `labels`: the group of each peer in a round, from 0 on."""

    def __init__(self, count: int, pattern: Pattern, size: int = 2) -> None:
        self.peers = tuple(f"peer {number:05d}" for number in range(count))
        self.topology = Groups(RUN_ID, size=size, pattern=pattern)
        self.values = np.random.default_rng(count + size).standard_normal(count)

    def labels(self, number: int) -> NDArray[np.int64]:
        cut = groups_by_peer(self.topology, number, self.peers)
        known: dict[frozenset[str], int] = {}
        return np.array([known.setdefault(cut[peer], len(known)) for peer in self.peers])

    def average(self, number: int) -> float:
        """One round; what it leaves of the variance."""
        before, labels = float(self.values.var()), self.labels(number)
        means = np.bincount(labels, weights=self.values) / np.bincount(labels)
        self.values = means[labels]
        return float(self.values.var()) / before

    def blobs_fetched(self, number: int) -> NDArray[np.int64]:
        """By peer: one of each mate; as many as it gives out."""
        labels = self.labels(number)
        fetched: NDArray[np.int64] = np.bincount(labels)[labels] - 1
        return fetched


def mean_factor(factors: list[float]) -> float:
    return math.exp(float(np.mean(np.log(factors))))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("count", [16, 1000, 10_000])
def test_random_groups_leave_one_part_in_g_of_the_variance_in_every_round(count: int, size: int) -> None:
    rounds = 400 if count == 16 else 12
    crowd, factors = AveragingPeers(count, "random", size), []
    mean = float(crowd.values.mean())
    for number in range(rounds):
        if crowd.values.var() < 1e-20:  # nothing but rounding is left: spread them anew
            crowd.values = np.random.default_rng(number).standard_normal(count)
            mean = float(crowd.values.mean())
        factors.append(crowd.average(number))
    expected = (count - size) / (size * (count - 1))
    # A group's mean of g values: the factor of one round strays by about sqrt(2 g / n) of itself.
    spread = 5 * math.sqrt(2 * size / count / rounds)
    assert float(np.mean(factors)) == pytest.approx(expected, rel=spread)
    assert float(crowd.values.mean()) == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("count", [1000, 10_000])
def test_groups_that_never_change_do_not_mix(count: int) -> None:
    """The negative control: the groups of round 0, again and again, against a new draw in each round."""
    fixed, redrawn = AveragingPeers(count, "random"), AveragingPeers(count, "random")
    for number in range(12):
        fixed.average(0)
        redrawn.average(number)
    assert fixed.values.var() == pytest.approx(0.5, rel=0.1)
    assert redrawn.values.var() < 2 * 0.5**12


def test_exponential_is_exact_after_log2_n_rounds_and_halves_till_then() -> None:
    crowd = AveragingPeers(8192, "exponential")
    factors = [crowd.average(number) for number in range(10)]
    assert mean_factor(factors) == pytest.approx(0.5, rel=0.1)
    for number in range(10, 13):
        crowd.average(number)
    assert crowd.values.var() < 1e-30


def test_exponential_still_mixes_where_n_is_no_power_of_two() -> None:
    """Slower: whose partner's place is empty stays alone. Two turns through all distances do it."""
    crowd = AveragingPeers(10_000, "exponential")
    for number in range(28):
        crowd.average(number)
    assert crowd.values.var() < 0.5**12


@pytest.mark.parametrize("count", [64, 1000])
def test_the_longest_wave_round_the_ring_fades_as_its_length_says(count: int) -> None:
    crowd = AveragingPeers(count, "ring")
    crowd.values = np.cos(2 * math.pi * np.arange(count) / count)
    crowd.average(0)
    factors = [crowd.average(number) for number in range(1, 20)]
    assert factors == pytest.approx([math.cos(2 * math.pi / count) ** 2] * 19)


def test_the_ring_does_not_mix_in_large_runs() -> None:
    """Why it is not the usual pattern: after k further rounds a peer has heard of 2 (k + 1) neighbours, unevenly."""
    crowd = AveragingPeers(10_000, "ring")
    for number in range(12):
        crowd.average(number)
    left = 0.5 * math.comb(22, 11) / 4**11
    assert left > 300 * 0.5**12, "what random pairs leave"
    assert crowd.values.var() == pytest.approx(left, rel=0.15)


@pytest.mark.parametrize(("pattern", "size"), [("random", 2), ("random", 8), ("ring", 2), ("exponential", 2)])
def test_what_a_peer_sends_does_not_grow_with_the_number_of_peers(pattern: Pattern, size: int) -> None:
    most = {}
    for count in (16, 160, 1600, 10_000):
        crowd = AveragingPeers(count, pattern, size)
        fetched = [crowd.blobs_fetched(number) for number in range(4)]
        most[count] = int(np.max(fetched)) * BLOB_BYTES
        assert float(np.mean(fetched)) <= size - 1 + size / count
    # A remainder of one joins the last group, so one group may have one more.
    assert set(most.values()) <= {(size - 1) * BLOB_BYTES, size * BLOB_BYTES}
    everybody = {count: (count - 1) * BLOB_BYTES for count in most}
    assert everybody[10_000] > 600 * everybody[16], "the negative control: all-gather"
