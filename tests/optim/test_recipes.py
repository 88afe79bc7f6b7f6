"""What each row of the table is meant to be: its formula against a slow one, and what tells it from its neighbours."""

import math

import pytest
import torch

from optim.aggregation.mean import Mean
from optim.codecs.subset import RandomSubset
from optim.compose import compose
from optim.exchange import Aggregator, ContributionEncoder
from optim.inner.base import GRADIENT_SUM, WEIGHTS
from optim.outer import DelayedNesterov, FrozenAdam
from optim.round_plan import RoundPlanner
from optim.signals import PseudoGradient, SignalInputs
from tests.optim.fake_peers import LAYOUT, LOSSLESS, NUMEL, FakePeer, decode_contribution, make_planner, random_values


def rounds(program: RoundPlanner, members: int, count: int) -> FakePeer:
    """Members that send what they draw; one of them, after `count` rounds."""
    replicas = [FakePeer(program) for _ in range(members)]
    for number in range(count):
        messages = [replica.encode(number, 100 * number + place) for place, replica in enumerate(replicas)]
        for replica in replicas:
            replica.apply(number, messages, [1.0] * members)
    return replicas[0]


def mean(number: int, members: int) -> torch.Tensor:
    return torch.stack([random_values(100 * number + place) for place in range(members)]).mean(0)


def test_data_parallel_is_adamw_on_the_mean_gradient() -> None:
    replica = rounds(make_planner("data-parallel"), 4, 6)
    matrices = torch.zeros(NUMEL, dtype=torch.bool)
    for start, stop in LAYOUT.matrix_spans:
        matrices[start:stop] = True
    weight, first, second = torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number in range(6):
        g = mean(number, 4)
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
        weight = torch.where(matrices, weight * (1 - 0.003 * 0.1), weight)
        spread = (second / (1 - 0.95 ** (number + 1))).sqrt() + 1e-8
        weight = weight - 0.003 * first / (1 - 0.9 ** (number + 1)) / spread
    assert torch.allclose(replica.anchor, weight, atol=1e-5)


def test_qsdp_differs_by_its_rounding_only() -> None:
    exact, rounded = (rounds(make_planner(name), 4, 6).anchor for name in ("data-parallel", "qsdp"))
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.05


def test_one_bit_adam_turns_to_signs_when_its_second_moment_freezes() -> None:
    method = compose("one-bit-adam")
    assert isinstance(method.update, FrozenAdam)
    warm = method.update.warm_rounds
    assert [method.at_round(number).codec.kind for number in (0, warm - 1, warm, warm + 500)] == ["none"] * 2 + [
        "sign"
    ] * 2
    bits = [8 * sum(make_planner("one-bit-adam").plan(number).max_sizes) / NUMEL for number in (0, warm)]
    assert bits[0] > 32 and bits[1] < 1.1


def test_demo_keeps_what_it_did_not_send() -> None:
    """With beta = 1: all that was sent and the momentum that is left are all gradients."""
    program = make_planner("demo", {"feedback": {"decay": 1.0}})
    sender, residual, sent = ContributionEncoder(program), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number in range(20):
        sent += decode_contribution(program, number, sender.encode(number, random_values(number), residual))
    total = sum((random_values(number) for number in range(20)), torch.zeros(NUMEL))
    assert torch.allclose(sent + residual, total, atol=1e-6)
    assert float(residual.norm()) > 0.1 * float(total.norm())


SUBSETS = ("detonation-random", "detonation-striding")


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_demo_may_take_off_a_share_of_what_was_sent(share: float) -> None:
    program = make_planner("demo", {"feedback": {"share": share}})
    residual, before = random_values(1).clone(), random_values(1)
    payloads = ContributionEncoder(program).encode(0, random_values(2), residual)
    momentum = 0.999 * before + random_values(2)
    assert torch.allclose(residual, momentum - share * decode_contribution(program, 0, payloads), atol=1e-6)


def test_demo_takes_the_mean_over_all_as_its_paper_and_distro_over_senders_as_its_code() -> None:
    for name, rule in (("demo", "mean"), ("distro", "sender-mean")):
        program = make_planner(name)
        assert program.method.aggregate.kind == rule
        payloads = [
            ContributionEncoder(program).encode(0, random_values(seed), torch.zeros(NUMEL))[0] for seed in range(8)
        ]
        merged = torch.from_numpy(Aggregator(program).merge(0, payloads, [1.0] * 8).to_dense())
        mean = torch.stack([program.plan(0).codecs[0].decode(payload, NUMEL) for payload in payloads]).mean(0)
        if rule == "mean":
            torch.testing.assert_close(merged, mean, rtol=1e-5, atol=1e-9)
        else:  # hardly two of eight sent the same coefficient: that is not divided by eight
            assert 6 < float(merged.norm() / mean.norm()) < 8


@pytest.mark.parametrize("recipe", ["demo", "distro", *SUBSETS, "detonation-full"])
def test_fast_momentum_moves_every_touched_weight_by_one_rate(recipe: str) -> None:
    program = make_planner(recipe, {"update": {"weight_decay": 0.0}})
    moved = rounds(program, 4, 1).anchor
    sizes = torch.tensor(sorted(set(moved.abs().tolist())))
    rate = 0.01 if recipe in SUBSETS else 0.001
    assert set(sizes.tolist()) <= {0.0, float(torch.tensor(rate))}
    touched = float((moved != 0).float().mean())
    assert touched == pytest.approx(0.0625 if recipe in SUBSETS else 1.0, abs=0.03)


def test_distro_sends_one_bit_values_a_step_late() -> None:
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
def test_replicators_send_the_same_places_of_all_members(recipe: str) -> None:
    program = make_planner(recipe)
    payloads = [ContributionEncoder(program).encode(3, random_values(seed), torch.zeros(NUMEL)) for seed in (1, 2, 3)]
    places = [decode_contribution(program, 3, payload) != 0 for payload in payloads]
    assert torch.equal(places[0], places[1]) and torch.equal(places[0], places[2])
    apart = make_planner("detonation-random", {"codec": {"shared": False}})
    drawn = [
        decode_contribution(apart, 3, ContributionEncoder(apart).encode(3, random_values(seed), torch.zeros(NUMEL)))
        != 0
        for seed in (1, 2)
    ]
    assert not torch.equal(drawn[0], drawn[1])


def test_striding_comes_round_to_every_value() -> None:
    program = make_planner("detonation-striding")
    codec = program.method.codec
    assert isinstance(codec, RandomSubset)
    stride = round(1 / codec.density)
    seen = torch.zeros(NUMEL)
    for number in range(stride):
        seen += (
            decode_contribution(
                program, number, ContributionEncoder(program).encode(number, torch.ones(NUMEL), torch.zeros(NUMEL))
            )
            != 0
        )
    assert seen.eq(1).all()
    rows, count = 64, 64 // stride
    public_code = {(number * stride * count) % rows % stride for number in range(100)}
    assert public_code == {0}, "an offset that advances by stride * count never leaves the first rows"


def test_full_replication_leaves_no_momentum_behind() -> None:
    program = make_planner("detonation-full", LOSSLESS)
    residual = random_values(1).clone()
    ContributionEncoder(program).encode(0, random_values(2), residual)
    assert not residual.any()


def test_senders_mean_goes_farther_than_the_mean_over_all() -> None:
    """Unrelated members, k = 64 of 4096; equal ones agree under both rules."""
    merged = {}
    for name in ("sparseloco", "sparseloco-senders"):
        program = make_planner(name)
        for seeds in (tuple(range(8)), (1,) * 8):
            payloads = [
                ContributionEncoder(program).encode(0, random_values(seed), torch.zeros(NUMEL))[0] for seed in seeds
            ]
            merged[name, len(set(seeds))] = torch.from_numpy(
                Aggregator(program).merge(0, payloads, [1.0] * 8).to_dense()
            )
    ratio = float(merged["sparseloco-senders", 8].norm() / merged["sparseloco", 8].norm())
    assert 6 < ratio < 8
    assert torch.allclose(merged["sparseloco-senders", 1], merged["sparseloco", 1], atol=1e-7)


def test_late_methods_apply_a_round_when_the_next_is_sent() -> None:
    for name in ("eager-diloco", "dilocox", "co2", "distro", "gossip-adam"):
        method = compose(name)
        for number in {*method.breakpoints, 7, 33, 1000}:
            schedule = method.at_round(number).schedule
            assert schedule.inner_steps == schedule.ahead == schedule.delay, name


def test_dilocox_shortens_its_period_with_its_rank() -> None:
    method = compose("dilocox")
    for number in (0, 10, 20, 40, 100):
        now = method.at_round(number)
        rank = int(vars(now.codec)["rank"])
        assert now.schedule.inner_steps == pytest.approx(124 * rank / 32, rel=0.05)
    assert method.feedback.keeps_error, "both of its compressions are biased"


def test_warm_rounds_are_synchronous_and_cool_down() -> None:
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


def test_des_loc_sends_half_of_local_adam() -> None:
    def values(recipe: str) -> float:
        program = make_planner(recipe)
        return sum(program.plan(number).numel for number in range(6)) / 6 / NUMEL

    assert values("local-adam") == 3 and values("des-loc") == pytest.approx(1 + 1 / 3 + 1 / 6)


def test_backup_workers_wait_for_more_and_more() -> None:
    method = compose("backup-workers")
    shares = [method.at_round(number).schedule.quorum for number in range(0, 600, 50)]
    assert shares[0] == 0.5 and shares[-1] == 1 and shares == sorted(shares)
    assert method.aggregate.weigh(1, 1) < 0.001 < method.aggregate.weigh(1, 0), "what comes too late hardly counts"


def test_fedbuff_discounts_what_is_late() -> None:
    """As published; with the public example's exponent of +0.5 what is late would count more."""
    rule = compose("fedbuff").aggregate
    assert isinstance(rule, Mean) and rule.over == "members", "the paper divides by how many came, not by their weights"
    assert [rule.weigh(500, age) for age in range(4)] == pytest.approx([1 / math.sqrt(1 + age) for age in range(4)])


def progress(start: torch.Tensor, live: torch.Tensor, steps: int) -> SignalInputs:
    sums = {GRADIENT_SUM: torch.zeros(0)}
    return SignalInputs(
        live={WEIGHTS: live}, reference={WEIGHTS: start}, anchor={WEIGHTS: start}, inner_state=sums, steps=steps
    )


def test_anarchic_members_pull_alike_however_many_steps_they_made() -> None:
    signal = compose("anarchic").signal
    assert isinstance(signal, PseudoGradient)
    start, courses = torch.zeros(2), (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    found = [
        signal.measure(progress(start, -course * steps, steps)) for course, steps in zip(courses, (20, 80), strict=True)
    ]
    assert torch.allclose(found[0], 20 * courses[0]) and torch.allclose(found[1], 20 * courses[1])
    plain = [PseudoGradient().measure(progress(start, -course * 80, 80)) for course in courses]
    assert torch.allclose(plain[1], 80 * courses[1]), "by distance the busy one pulls four times as hard"


def test_delayed_nesterov_waits_for_as_many_as_all() -> None:
    method = compose("delayed-nesterov")
    assert isinstance(method.update, DelayedNesterov)
    assert method.update.period * method.schedule.quorum == 1


def test_streaming_fragments_are_strided_and_in_flight_one_at_a_time() -> None:
    program = make_planner("streaming-diloco")
    schedule = program.method.schedule
    assert schedule.delay < schedule.inner_steps / schedule.fragments
    plan, blocks = program.plan(1), LAYOUT.block_spans
    assert plan.spans == tuple(blocks[1 :: schedule.fragments])
    largest = max(program.plan(number).numel for number in program.cycle)
    assert largest < 0.5 * NUMEL
