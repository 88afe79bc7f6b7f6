import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from optim.aggregation.base import WeightedPayload
from optim.aggregation.edit_penalty import EditPenalty
from optim.aggregation.mean import Mean
from optim.codecs.floats import Uncompressed
from optim.compose import compose
from optim.errors import UnknownOption
from optim.exchange import Aggregator
from optim.kernels.vectors import Floats
from optim.layout import Layout
from tests.optim.fake_peers import LOSSLESS, FakePeer, Tables, make_planner

LAYOUT = Layout(((10, 5), (30,)), (0, 1))
NUMEL = LAYOUT.numel


def draw(seed: int, norm: float = 1.0, numel: int = NUMEL) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    for start, stop in ((0, 50), (50, numel)):
        values[start:stop] *= norm / values[start:stop].norm()
    return values


def messages(vectors: Sequence[torch.Tensor], weights: Sequence[float] | None = None) -> list[WeightedPayload]:
    codec = Uncompressed().bind(LAYOUT, 0)
    return [
        WeightedPayload(codec, codec.encode(vector), vector.numel(), weight)
        for vector, weight in zip(vectors, weights or [1.0] * len(vectors), strict=True)
    ]


def close(found: Floats, expected: torch.Tensor, tolerance: float = 1e-6) -> bool:
    return bool(np.allclose(found, expected.numpy(), atol=tolerance))


def test_equal_norms_give_the_plain_mean() -> None:
    vectors = [draw(seed) for seed in range(5)]
    found = EditPenalty().combine(messages(vectors))
    assert close(found, torch.stack(vectors).mean(0))
    assert np.allclose(found, Mean(weights="equal").combine(messages(vectors)), atol=1e-6)


@pytest.mark.parametrize("members", [3, 4, 8])
def test_a_norm_a_hundred_times_larger_counts_nothing(members: int) -> None:
    honest = [draw(seed) for seed in range(members - 1)]
    liar = draw(99, 100.0)
    found = EditPenalty().combine(messages([*honest, liar]))
    assert close(found, torch.stack(honest).mean(0))
    plain = Mean().combine(messages([*honest, liar]))
    assert np.linalg.norm(plain) > 10, "the mean alone follows it"


def taught(rounds: int, members: int = 4, rate: float = 0.02) -> tuple[EditPenalty, Floats]:
    """What is known after rounds of norms of 1 +- 0.05."""
    rule, chance = EditPenalty(statistics="running", rate=rate), np.random.default_rng(1)
    memory = np.zeros(rule.state_size, np.float32)
    for number in range(rounds):
        vectors = [draw(10 * number + seed, float(chance.normal(1, 0.05))) for seed in range(members)]
        rule.combine(messages(vectors), memory)
    return rule, memory


def test_running_statistics_are_right_from_the_first_rounds() -> None:
    """After 120 norms of 1 +- 0.05, 1.15 is the limit. The control: from zero and uncorrected, as in the public code,
    0.91 +- 0.29 are believed then, and all below 1.77 passes."""
    _, memory = taught(30)
    count, mean, variance = memory[:3]
    assert count == 120 and mean == pytest.approx(1, abs=0.02) and variance**0.5 == pytest.approx(0.05, abs=0.015)
    chance, mean, variance = np.random.default_rng(1), 0.0, 0.0
    for _ in range(120):
        far = float(chance.normal(1, 0.05)) - mean
        mean, variance = mean + 0.02 * far, 0.98 * (variance + 0.02 * far * far)
    assert mean + 3 * variance**0.5 > 1.7


@pytest.mark.parametrize(("norm", "counts"), [(1.0, True), (1.08, True), (1.35, False), (100.0, False)])
def test_a_norm_beyond_what_is_known_counts_nothing_and_teaches_nothing(norm: float, counts: bool) -> None:
    rule, memory = taught(30)
    honest = [draw(seed) for seed in range(3)]
    found = rule.combine(messages([*honest, draw(99, norm)]), memory)
    assert close(found, torch.stack(honest).mean(0)) is not counts
    assert memory[0] == memory[3] == 120 + 3 + counts
    assert EditPenalty().combine(messages([draw(1, norm)])).any(), "the control: of one member a round tells nothing"


def test_where_all_are_out_of_bounds_the_block_stays_and_the_bounds_move() -> None:
    rule, memory = taught(30)
    vectors = [draw(seed, 5.0) for seed in range(4)]
    assert not rule.combine(messages(vectors), memory).any()
    rounds = next(number for number in range(100) if rule.combine(messages(vectors), memory).any())
    assert rounds < 20, "what has grown for good is believed in time"


def test_the_first_rounds_only_learn() -> None:
    rule = EditPenalty(statistics="running")
    memory = np.zeros(rule.state_size, np.float32)
    found = rule.combine(messages([draw(0), draw(1), draw(2, 50.0)]), memory)
    assert found.any() and memory[0] == 3
    assert EditPenalty().state_size == 0


@pytest.mark.parametrize("tables", [{"topology": {"kind": "butterfly"}}, {"schedule": {"fragments": 2}}])
def test_what_is_remembered_is_remembered_by_all(tables: Tables) -> None:
    with pytest.raises(UnknownOption, match="statistics = 'round'"):
        compose("edit", tables)
    assert compose("edit", tables | {"aggregate": {"statistics": "round"}}).slots == ("momentum",)
    assert compose("edit").slots == ("aggregate_memory", "momentum")


def test_replicas_remember_the_same() -> None:
    peers = [FakePeer(make_planner("edit", LOSSLESS)) for _ in range(3)]
    for number in range(12):
        sent = [peer.encode(number, 10 * number + place) for place, peer in enumerate(peers)]
        for peer in peers:
            peer.apply(number, sent, [1.0, 2.0, 1.0])
    states = [torch.cat(peer.state) for peer in peers]
    assert torch.equal(states[0], states[1]) and peers[0].slots["aggregate_memory"][0] == 36


def test_block_by_block() -> None:
    """A member that is far off in one block keeps its say in the other."""
    vectors = [draw(seed) for seed in range(4)]
    vectors[3][50:] *= 100
    found = EditPenalty().combine(messages(vectors))
    assert close(found[:50], torch.stack(vectors)[:, :50].mean(0))
    assert close(found[50:], torch.stack(vectors)[:3, 50:].mean(0))


def test_weights_are_the_softmax_of_norms_over_their_median() -> None:
    norms = [3.0, 3.2, 3.5, 4.0]
    vectors = [draw(seed, norm) for seed, norm in enumerate(norms)]
    for scale in (1.0, 10.0):
        found = EditPenalty(temperature=0.5, clip=1e9).combine(messages([vector * scale for vector in vectors]))
        raw = [float(np.exp(-norm / 3.35 / 0.5)) for norm in norms]
        weights = [value / sum(raw) for value in raw]
        expected = sum((w * v for w, v in zip(weights, vectors, strict=True)), torch.zeros(NUMEL)) * scale
        assert close(found / scale, expected / scale)
    by_hand = [float(np.exp(-norm * 10)) for norm in norms]
    assert by_hand[0] / sum(by_hand) > 0.85, "the paper's own softmax leaves the smallest alone at ten times the norms"


def test_a_member_that_hardly_trains_is_favoured_unless_both_sides_are_judged() -> None:
    vectors = [draw(seed) for seed in range(5)]
    lazy = draw(50, 0.01)
    share = {}
    for both_sides in (False, True):
        rule = EditPenalty(both_sides=both_sides)
        share[both_sides] = rule._block_weights([1.0, 1.01, 0.99, 1.0, 1.02, 0.01], [1.0] * 6)[-1]
        assert np.isfinite(rule.combine(messages([*vectors, lazy]))).all()
    assert share[False] > 1 / 3 and share[True] == 0


def test_at_their_own_pace_steps_count() -> None:
    """Norms grow with the root of the steps; whoever made four times as many is neither left out nor small."""
    vectors = [draw(0), draw(1), draw(2), draw(3, 2.0)]
    tokens = [100.0, 100.0, 100.0, 400.0]
    own_pace = EditPenalty(tokens=0.5).combine(messages(vectors, tokens))
    weights = [0.5 / 4 + 0.5 * count / 700 for count in tokens]
    assert close(own_pace, sum((w * v for w, v in zip(weights, vectors, strict=True)), torch.zeros(NUMEL)))
    by_norms = EditPenalty().combine(messages(vectors, tokens))
    assert close(by_norms, torch.stack(vectors[:3]).mean(0)), "in step with one another it would be an outlier"


def test_the_clip_bounds_each_block() -> None:
    found = EditPenalty(clip=0.5).combine(messages([draw(1), draw(1), draw(2)]))
    for start, stop in LAYOUT.block_spans:
        assert np.linalg.norm(found[start:stop]) <= 0.5 + 1e-6
    assert close(EditPenalty(clip=3.0).combine(messages([draw(1)] * 3)), draw(1)), "and lets what is below it be"


def test_order_and_absence_change_nothing() -> None:
    vectors = [draw(seed, 1 + seed / 10) for seed in range(4)]
    expected = EditPenalty().combine(messages(vectors))
    for order in itertools.permutations(range(4)):
        found = EditPenalty().combine(messages([vectors[place] for place in order]))
        assert np.allclose(found, expected, atol=1e-6)
    absent = EditPenalty().combine(messages([*vectors, draw(9)], [1.0, 1.0, 1.0, 1.0, 0.0]))
    assert np.array_equal(absent, expected)


def test_nothing_moved_and_one_alone() -> None:
    assert not EditPenalty().combine(messages([torch.zeros(NUMEL)] * 3)).any()
    assert close(EditPenalty().combine(messages([draw(4)])), draw(4))


def test_whole_messages_are_judged_by_the_models_blocks_and_parts_by_themselves() -> None:
    for topology, blocks in (("gather", 10), ("butterfly", 1)):
        program = make_planner("edit", {"topology": {"kind": topology}, "aggregate": {"statistics": "round"}})
        plan = program.plan(0)
        layout = plan.codecs[0].bound_layout(plan.part_spans[0][1])
        assert layout is not None and len(layout.block_spans) == blocks
        payload = plan.codecs[0].encode(torch.full((plan.part_spans[0][1],), 2.0**-7))
        if topology == "gather":
            assert (Aggregator(program).merge(0, [payload] * 2, [1.0, 1.0]).to_dense() == 2.0**-7).all()
