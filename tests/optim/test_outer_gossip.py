import random

import pytest
import torch

from optim.compose import compose
from optim.errors import UnknownOption
from optim.outer import Gossip, GossipWeights, Nesterov, OuterOptimizer, OuterStep, Replace, consensus_factor

STABILITY = [  # size, alpha, gamma, factor
    *((2, 0.0, 1.0, 0.50), (2, 0.0, 0.7, 0.55), (2, 0.3, 0.58, 0.55), (2, 0.3, 0.7, 0.55)),
    *((2, 0.5, 0.3, 0.63), (2, 0.5, 0.7, 0.70), (2, 0.9, 0.7, 1.10), (4, 0.5, 0.22, 0.54), (4, 0.5, 0.7, 0.59)),
]
EDGES = [(2, 0.0, 2.0), (2, 0.3, 1.81), (2, 0.5, 1.49), (2, 0.9, 0.37), (4, 0.5, 2.0)]  # size, alpha, largest gamma


@pytest.mark.parametrize(("size", "alpha", "gamma", "factor"), STABILITY)
def test_consensus_factor(size: int, alpha: float, gamma: float, factor: float) -> None:
    assert consensus_factor(alpha, gamma, size) == pytest.approx(factor, abs=0.0051)


@pytest.mark.parametrize(("size", "alpha", "gamma"), EDGES)
def test_consensus_factor_crosses_one_at_the_known_edges(size: int, alpha: float, gamma: float) -> None:
    assert consensus_factor(alpha, gamma - 0.02, size) < 1 < consensus_factor(alpha, gamma + 0.02, size)


@pytest.mark.parametrize(("size", "alpha", "gamma"), [(2, 0.5, 0.7), (2, 0.0, 1.0), (4, 0.5, 0.7), (2, 0.9, 0.7)])
def test_variance_of_simulated_groups_follows_the_consensus_factor(size: int, alpha: float, gamma: float) -> None:
    peers, rounds = 400, 30
    update, generator = Gossip(alpha=alpha, gamma=gamma), random.Random(1)
    anchors = list(torch.randn(peers, 50, generator=torch.Generator().manual_seed(1)).unbind())
    slots = [{"momentum": torch.zeros(50)} for _ in range(peers)]
    spread = [float(torch.stack(anchors).var(0).mean())]
    for _ in range(rounds):
        order = generator.sample(range(peers), peers)
        for start in range(0, peers, size):
            group = order[start : start + size]
            mean = torch.stack([anchors[peer] for peer in group]).mean(0)
            merged = torch.cat([torch.zeros(50), mean])
            for peer in group:
                update.apply(anchors[peer], slots[peer], merged, OuterStep())
        spread.append(float(torch.stack(anchors).var(0).mean()))
    measured = (spread[-1] / spread[10]) ** (1 / (rounds - 10))
    assert measured == pytest.approx(consensus_factor(alpha, gamma, size), abs=0.04)


@pytest.mark.parametrize(
    "update", [{"alpha": 0.9}, {"gamma": 1.6}, {"gamma": 0.0}, {"kind": "nesterov"}, {"kind": "replace"}], ids=str
)
def test_unstable_settings_are_refused_before_the_run(update: dict[str, float | str]) -> None:
    with pytest.raises(UnknownOption) as refusal:
        compose("noloco", {"update": update})
    assert "\n" not in str(refusal.value) and ("update" in str(refusal.value))
    compose("noloco", {"update": {"alpha": 0.9, "gamma": 0.3}})


def test_larger_groups_are_stable_where_pairs_are_not() -> None:
    with pytest.raises(UnknownOption, match="lower update.gamma"):
        compose("noloco", {"update": {"gamma": 1.6}})
    compose("noloco", {"update": {"gamma": 1.6}, "topology": {"size": 4}})


def step_pair(update: OuterOptimizer, phi: list[float], theta: list[float]) -> tuple[list[float], list[float]]:
    """Return momentum and anchor of both partners after one round."""
    anchors = [torch.tensor([value]) for value in phi]
    weights = [torch.tensor([value]) for value in theta]
    slots = [{"momentum": torch.zeros(1)} for _ in phi]
    progress = torch.stack([a - w for a, w in zip(anchors, weights, strict=True)]).mean(0)
    mean = torch.stack(anchors).mean(0)
    merged = torch.cat([progress, mean]) if isinstance(update, Gossip) else torch.stack(weights).mean(0)
    for anchor, slot in zip(anchors, slots, strict=True):
        update.apply(anchor, slot, merged, OuterStep())
    return [float(slot["momentum"]) for slot in slots], [float(anchor) for anchor in anchors]


@pytest.mark.parametrize("update", [Gossip(), GossipWeights()], ids=str)
def test_noloco_by_hand(update: OuterOptimizer) -> None:
    """alpha 0.5, beta = gamma = 0.7: with progress and anchor, or weights alone, the step is the same."""
    momentum, anchors = step_pair(update, [0.0, 2.0], [1.0, 2.0])
    assert momentum == pytest.approx([1.05, -0.35]) and anchors == pytest.approx([1.05, 1.65])


def test_consensus_term_does_not_move_the_mean() -> None:
    _, anchors = step_pair(Gossip(gamma=0.4), [0.0, 3.0], [0.0, 3.0])
    assert sum(anchors) == pytest.approx(3.0) and anchors[0] > 0 and anchors[1] < 3
    _, apart = step_pair(Gossip(gamma=0.0), [0.0, 3.0], [0.0, 3.0])
    assert apart == [0.0, 3.0]


def test_peer_alone_moves_to_its_trained_weights() -> None:
    for update in (Gossip(alpha=0.0, beta=1.0), GossipWeights(alpha=0.0, beta=1.0)):
        assert step_pair(update, [1.0], [5.0])[1] == pytest.approx([5.0])


def test_with_equal_anchors_gossip_is_heavy_ball() -> None:
    gossip, slots = torch.zeros(1), {"momentum": torch.zeros(1)}
    plain, momentum = 0.0, 0.0
    for delta in (1.0, -2.0, 0.5):
        Gossip().apply(gossip, slots, torch.tensor([delta, float(gossip)]), OuterStep())
        momentum = 0.5 * momentum - 0.7 * delta
        plain += momentum
        assert float(gossip) == pytest.approx(plain)
    nesterov, others = torch.zeros(1), {"momentum": torch.zeros(1)}
    for delta in (1.0, -2.0, 0.5):
        Nesterov(learning_rate=0.7, momentum=0.5).apply(nesterov, others, torch.tensor([delta]), OuterStep())
    assert float(nesterov) != pytest.approx(plain), "there is no look-ahead, despite its name in the paper"


def test_exponential_pattern_averages_exactly() -> None:
    """log2 n rounds of pairs at distances 1, 2, 4 reach the mean; a ring of pairs needs more."""
    for distances, exact in (([1, 2, 4], True), ([1, 1, 1], False)):
        anchors = [torch.tensor([float(2**peer)]) for peer in range(8)]
        mean = float(torch.stack(anchors).mean())
        for distance in distances:
            means = [(anchors[peer] + anchors[peer ^ distance]) / 2 for peer in range(8)]
            for anchor, merged in zip(anchors, means, strict=True):
                Replace().apply(anchor, {}, merged, OuterStep())
            assert float(torch.stack(anchors).mean()) == mean
        assert all(float(anchor) == mean for anchor in anchors) == exact
