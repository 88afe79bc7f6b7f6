"""The meaning of each recipe: its formula compared with a slow one, and its difference from similar recipes."""

import math

import pytest
import torch

from optim.aggregation.mean import Mean
from optim.codecs.subset import RandomSubset
from optim.compose import compose
from optim.exchange import Aggregator, ContributionEncoder
from optim.inner.base import GRADIENT_SUM, WEIGHTS
from optim.inner.muon import Muon
from optim.outer import DelayedNesterov, FrozenAdam, OuterStep
from optim.round_plan import RoundPlanner
from optim.signals import PseudoGradient, SignalInputs
from tests.optim.fake_peers import (
    LAYOUT,
    LOSSLESS,
    NUMEL,
    FakePeer,
    decode_contribution,
    encode,
    make_planner,
    new_slots,
    random_values,
)


def run_rounds(planner: RoundPlanner, members: int, count: int) -> FakePeer:
    """Run rounds of members that send random values, and return one of the members."""
    replicas = [FakePeer(planner) for _ in range(members)]
    for number in range(count):
        contributions = [replica.encode(number, 100 * number + place) for place, replica in enumerate(replicas)]
        for replica in replicas:
            replica.apply(number, contributions, [1.0] * members)
    return replicas[0]


def mean_of_members(number: int, members: int) -> torch.Tensor:
    return torch.stack([random_values(100 * number + place) for place in range(members)]).mean(0)


def test_data_parallel_is_adamw_on_the_mean_gradient() -> None:
    replica = run_rounds(make_planner("data-parallel"), 4, 6)
    matrices = torch.zeros(NUMEL, dtype=torch.bool)
    for start, stop in LAYOUT.matrix_spans:
        matrices[start:stop] = True
    weight, first, second = torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number in range(6):
        g = mean_of_members(number, 4)
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
        weight = torch.where(matrices, weight * (1 - 0.003 * 0.1), weight)
        spread = (second / (1 - 0.95 ** (number + 1))).sqrt() + 1e-8
        weight = weight - 0.003 * first / (1 - 0.9 ** (number + 1)) / spread
    assert torch.allclose(replica.anchor, weight, atol=1e-5)


def test_muloco_is_diloco_with_muon_and_the_steps_of_its_paper() -> None:
    """Progress of one in each round moves the anchor by 0.9 (1 + 0.8 m), with m = 1, 1.8, 2.44."""
    method, diloco = compose("muloco"), compose("diloco")
    assert method.inner == Muon() and diloco.inner != method.inner
    assert (method.codec, method.feedback, method.aggregate) == (diloco.codec, diloco.feedback, diloco.aggregate)
    anchor, slots = torch.zeros(1), {"momentum": torch.zeros(1)}
    found = []
    for _ in range(3):
        method.update.apply(anchor, slots, torch.ones(1), OuterStep())
        found.append(-float(anchor))
    assert found == pytest.approx([1.62, 1.62 + 2.196, 1.62 + 2.196 + 2.6568])


def test_qsdp_differs_only_by_rounding() -> None:
    exact, rounded = (run_rounds(make_planner(name), 4, 6).anchor for name in ("data-parallel", "qsdp"))
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.05


def test_one_bit_adam_sends_signs_once_its_second_moment_is_frozen() -> None:
    method = compose("one-bit-adam")
    assert isinstance(method.update, FrozenAdam)
    warm = method.update.warm_rounds
    assert [method.at_round(number).codec.kind for number in (0, warm - 1, warm, warm + 500)] == ["none"] * 2 + [
        "sign"
    ] * 2
    bits = [8 * sum(make_planner("one-bit-adam").plan(number).max_sizes) / NUMEL for number in (0, warm)]
    assert bits[0] > 32 and bits[1] < 1.1


def test_demo_keeps_the_unsent_momentum() -> None:
    """With beta = 1, sent values and remaining momentum sum to all gradients."""
    planner = make_planner("demo", {"feedback": {"decay": 1.0}})
    sender, residual, sent = ContributionEncoder(planner), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number in range(20):
        sent += decode_contribution(planner, number, encode(sender, number, random_values(number), residual))
    total = sum((random_values(number) for number in range(20)), torch.zeros(NUMEL))
    assert torch.allclose(sent + residual, total, atol=1e-6)
    assert float(residual.norm()) > 0.1 * float(total.norm())


SUBSETS = ("detonation-random", "detonation-striding")


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_demo_may_subtract_a_share_of_the_sent_values(share: float) -> None:
    planner = make_planner("demo", {"feedback": {"share": share}})
    residual, before = random_values(1).clone(), random_values(1)
    payloads = encode(ContributionEncoder(planner), 0, random_values(2), residual)
    momentum = 0.999 * before + random_values(2)
    assert torch.allclose(residual, momentum - share * decode_contribution(planner, 0, payloads), atol=1e-6)


def test_demo_averages_over_all_members_and_distro_over_senders() -> None:
    for name, rule in (("demo", "mean"), ("distro", "sender-mean")):
        planner = make_planner(name)
        assert planner.method.aggregate.kind == rule
        payloads = [
            ContributionEncoder(planner).encode(0, random_values(seed), torch.zeros(NUMEL))[0] for seed in range(8)
        ]
        merged = torch.from_numpy(Aggregator(planner).merge(0, payloads, [1.0] * 8, new_slots()).vector.to_dense())
        mean = torch.stack([planner.plan(0).codecs[0].decode(payload, NUMEL) for payload in payloads]).mean(0)
        if rule == "mean":
            torch.testing.assert_close(merged, mean, rtol=1e-5, atol=1e-9)
        else:  # hardly two of eight members send the same coefficient, so it is not divided by eight
            assert 6 < float(merged.norm() / mean.norm()) < 8


@pytest.mark.parametrize("recipe", ["demo", "distro", *SUBSETS, "detonation-full"])
def test_sign_recipes_move_every_sent_weight_by_the_rate(recipe: str) -> None:
    planner = make_planner(recipe, {"update": {"weight_decay": 0.0}})
    moved = run_rounds(planner, 4, 1).anchor
    sizes = torch.tensor(sorted(set(moved.abs().tolist())))
    rate = 0.01 if recipe in SUBSETS else 0.001
    assert set(sizes.tolist()) <= {0.0, float(torch.tensor(rate))}
    touched = float((moved != 0).float().mean())
    assert touched == pytest.approx(0.0625 if recipe in SUBSETS else 1.0, abs=0.03)


def test_distro_sends_one_bit_values_and_applies_them_a_step_late() -> None:
    method, demo = compose("distro"), compose("demo")
    assert (method.schedule.ahead, method.schedule.delay, method.schedule.inner_steps) == (1, 1, 1)
    sizes = [RoundPlanner(one, LAYOUT, 1).max_contribution_bytes for one in (method, demo)]
    lengths = [
        len(ContributionEncoder(make_planner(one)).encode(0, random_values(1), torch.zeros(NUMEL))[0])
        for one in (method, demo)
    ]
    assert lengths[0] < lengths[1] and sizes[0] <= sizes[1]
    assert compose("demo", {"inner": {"kind": "gathering-ahead"}}).inner.vectors == method.inner.vectors


@pytest.mark.parametrize("recipe", SUBSETS)
def test_detonation_members_send_the_same_positions(recipe: str) -> None:
    planner = make_planner(recipe)
    payloads = [ContributionEncoder(planner).encode(3, random_values(seed), torch.zeros(NUMEL)) for seed in (1, 2, 3)]
    places = [decode_contribution(planner, 3, payload) != 0 for payload in payloads]
    assert torch.equal(places[0], places[1]) and torch.equal(places[0], places[2])
    apart = make_planner("detonation-random", {"codec": {"shared": False}})
    drawn = [
        decode_contribution(apart, 3, ContributionEncoder(apart).encode(3, random_values(seed), torch.zeros(NUMEL)))
        != 0
        for seed in (1, 2)
    ]
    assert not torch.equal(drawn[0], drawn[1])


def test_striding_sends_every_value_in_turn() -> None:
    planner = make_planner("detonation-striding")
    codec = planner.method.codec
    assert isinstance(codec, RandomSubset)
    stride = round(1 / codec.density)
    seen = torch.zeros(NUMEL)
    for number in range(stride):
        seen += (
            decode_contribution(
                planner, number, ContributionEncoder(planner).encode(number, torch.ones(NUMEL), torch.zeros(NUMEL))
            )
            != 0
        )
    assert seen.eq(1).all()
    rows, count = 64, 64 // stride
    public_code = {(number * stride * count) % rows % stride for number in range(100)}
    assert public_code == {0}, "an offset that advances by stride * count never leaves the first rows"


def test_detonation_full_leaves_no_residual() -> None:
    planner = make_planner("detonation-full", LOSSLESS)
    residual = random_values(1).clone()
    encode(ContributionEncoder(planner), 0, random_values(2), residual)
    assert not residual.any()


def test_sender_mean_moves_farther_than_the_mean_over_all() -> None:
    """Members are unrelated, k = 64 of 4096; equal members would agree under both rules."""
    merged = {}
    for name in ("sparseloco", "sparseloco-senders"):
        planner = make_planner(name)
        for seeds in (tuple(range(8)), (1,) * 8):
            payloads = [
                ContributionEncoder(planner).encode(0, random_values(seed), torch.zeros(NUMEL))[0] for seed in seeds
            ]
            merged[name, len(set(seeds))] = torch.from_numpy(
                Aggregator(planner).merge(0, payloads, [1.0] * 8, new_slots()).vector.to_dense()
            )
    ratio = float(merged["sparseloco-senders", 8].norm() / merged["sparseloco", 8].norm())
    assert 6 < ratio < 8
    assert torch.allclose(merged["sparseloco-senders", 1], merged["sparseloco", 1], atol=1e-7)


def test_overlapped_recipes_apply_a_round_when_the_next_is_sent() -> None:
    for name in ("eager-diloco", "dilocox", "co2", "distro", "gossip-adam"):
        method = compose(name)
        for number in {*method.breakpoints, 7, 33, 1000}:
            schedule = method.at_round(number).schedule
            assert schedule.inner_steps == schedule.ahead == schedule.delay, name


def test_dilocox_lowers_its_inner_steps_with_its_rank() -> None:
    method = compose("dilocox")
    for number in (0, 10, 20, 40, 100):
        now = method.at_round(number)
        rank = int(vars(now.codec)["rank"])
        assert now.schedule.inner_steps == pytest.approx(124 * rank / 32, rel=0.05)
    assert method.feedback.keeps_error, "both of its compressions are biased"


def test_warm_rounds_are_synchronous_and_then_change_gradually() -> None:
    diloco, sparse = compose("diloco-warm"), compose("sparseloco-warm")
    for method in (diloco, sparse):
        steps = [method.at_round(number).schedule.inner_steps for number in range(120)]
        assert steps[:50] == [1] * 50 and steps[50] == 10 and steps == sorted(steps)
    momenta = [vars(diloco.at_round(number).update)["momentum"] for number in range(120)]
    assert momenta[49] == 0 and momenta[50] == 0.5 and momenta[-1] == 0.9 and momenta == sorted(momenta)
    kinds = [sparse.at_round(number).codec.kind for number in (0, 49, 50, 119)]
    assert kinds == ["int8", "int8", "topk", "topk"]
    kept = [vars(sparse.at_round(number).codec)["k"] for number in range(50, 120)]
    assert kept[0] == 256 and kept[-1] == 64 and kept == sorted(kept, reverse=True)


def test_des_loc_sends_half_as_much_as_local_adam() -> None:
    def values(recipe: str) -> float:
        planner = make_planner(recipe)
        return sum(planner.plan(number).numel for number in range(6)) / 6 / NUMEL

    assert values("local-adam") == 3 and values("des-loc") == pytest.approx(1 + 1 / 3 + 1 / 6)


def test_backup_workers_raise_the_quorum_over_the_rounds() -> None:
    method = compose("backup-workers")
    shares = [method.at_round(number).schedule.quorum for number in range(0, 600, 50)]
    assert shares[0] == 0.5 and shares[-1] == 1 and shares == sorted(shares)
    assert method.aggregate.weigh(1, 1) < 0.001 < method.aggregate.weigh(1, 0), "late contributions hardly count"


def test_fedbuff_discounts_late_contributions() -> None:
    """As published; with the exponent +0.5 of the public example, late contributions would count more."""
    rule = compose("fedbuff").aggregate
    assert isinstance(rule, Mean) and rule.over == "members", (
        "the paper divides by the number of members, not by their weights"
    )
    assert [rule.weigh(500, age) for age in range(4)] == pytest.approx([1 / math.sqrt(1 + age) for age in range(4)])


def progress(start: torch.Tensor, live: torch.Tensor, steps: int) -> SignalInputs:
    sums = {GRADIENT_SUM: torch.zeros(0)}
    return SignalInputs(
        live={WEIGHTS: live}, reference={WEIGHTS: start}, anchor={WEIGHTS: start}, inner_state=sums, steps=steps
    )


def test_anarchic_members_pull_equally_with_any_number_of_steps() -> None:
    signal = compose("anarchic").signal
    assert isinstance(signal, PseudoGradient)
    start, courses = torch.zeros(2), (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    found = [
        signal.measure(progress(start, -course * steps, steps)) for course, steps in zip(courses, (20, 80), strict=True)
    ]
    assert torch.allclose(found[0], 20 * courses[0]) and torch.allclose(found[1], 20 * courses[1])
    plain = [PseudoGradient().measure(progress(start, -course * 80, 80)) for course in courses]
    assert torch.allclose(plain[1], 80 * courses[1]), "without equal_steps the faster one pulls four times as hard"


def test_delayed_nesterov_has_one_period_per_round_of_all_members() -> None:
    method = compose("delayed-nesterov")
    assert isinstance(method.update, DelayedNesterov)
    assert method.update.period * method.schedule.quorum == 1


def test_streaming_fragments_are_strided_and_sent_one_at_a_time() -> None:
    planner = make_planner("streaming-diloco")
    schedule = planner.method.schedule
    assert schedule.delay < schedule.inner_steps / schedule.fragments
    plan, blocks = planner.plan(1), LAYOUT.block_spans
    assert plan.spans == tuple(blocks[1 :: schedule.fragments])
    largest = max(planner.plan(number).numel for number in planner.cycle)
    assert largest < 0.5 * NUMEL
