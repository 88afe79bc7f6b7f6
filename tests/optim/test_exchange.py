"""Encoding and aggregation together: the invariants of whole methods, for every recipe."""

import pytest
import torch

from optim.codecs.topk import ChunkTopK
from optim.compose import CODECS, compose
from optim.errors import CodecError
from optim.exchange import Aggregator, ContributionEncoder
from optim.recipes import RECIPES
from tests.optim.fake_peers import (
    LOSSLESS,
    NO_PROGRESS,
    NUMEL,
    PART_COUNT,
    FakePeer,
    Tables,
    curve,
    decode_contribution,
    encode,
    make_planner,
    random_values,
    sent_mask,
)

DELTAS = [name for name in RECIPES if compose(name).signal.is_delta]
ROUNDS = [
    (recipe, round_number)
    for recipe in RECIPES
    for round_number in sorted({*list(make_planner(recipe).cycle)[:6], *make_planner(recipe).method.breakpoints})
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
each_delta = pytest.mark.parametrize("recipe", DELTAS)
each_round = pytest.mark.parametrize(("recipe", "round_number"), ROUNDS)
FEEDBACKS: Tables = {"error": {"kind": "error", "decay": 1.0}, "none": {"kind": "none"}}
UNCLIPPED: Tables = {"aggregate": {"kind": "mean", "weights": "equal", "over": "weights"}}


@each_round
def test_contribution_and_residual_sum_to_all_progress(recipe: str, round_number: int) -> None:
    """decay * residual_before + delta == share * decoded + residual_after for the sent values; others are unchanged."""
    planner = make_planner(recipe)
    method, mask = planner.method.at_round(round_number), sent_mask(planner, round_number).bool()
    residual = random_values(0, planner.signal_numel)
    expected = residual * method.feedback.decay + random_values(1, planner.signal_numel)
    payloads = encode(ContributionEncoder(planner), round_number, random_values(1, planner.signal_numel), residual)
    contribution = decode_contribution(planner, round_number, payloads)
    if method.feedback.keeps_error:
        held = residual + method.feedback.share * contribution
        torch.testing.assert_close(held[mask], expected[mask], rtol=1e-5, atol=1e-8)
    else:
        assert not residual[mask].any()
    assert torch.equal(residual[~mask], random_values(0, planner.signal_numel)[~mask])
    assert (contribution[~mask] == 0).all()


def test_residual_decays_before_progress_is_added() -> None:
    """To the bit: each operation is rounded, and the residual is exactly what the codec did not send."""
    planner = make_planner("sparseloco", {"feedback": {"kind": "error", "decay": 0.9}})
    residual, delta = random_values(0, planner.signal_numel), random_values(1, planner.signal_numel)
    expected = residual * 0.9
    expected += delta
    contribution = decode_contribution(planner, 0, encode(ContributionEncoder(planner), 0, delta, residual))
    assert torch.equal(residual, expected - contribution) and contribution.any()


@each_delta
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_excluded_contribution_is_sent_again(recipe: str, feedback: str) -> None:
    """One contribution of three cycles is dropped; the applied ones and the residual still sum to all progress."""
    planner = make_planner(recipe, {"feedback": FEEDBACKS[feedback], **LOSSLESS})
    encoder, applied, everything = ContributionEncoder(planner), *torch.zeros(2, planner.signal_numel)
    residual, dropped = torch.zeros(planner.signal_numel), torch.zeros(planner.signal_numel)
    for round_number in range(3 * len(planner.cycle)):
        delta = random_values(round_number, planner.signal_numel) * sent_mask(planner, round_number)
        everything += delta
        payloads = encode(encoder, round_number, delta, residual)
        if round_number == 1:
            dropped = decode_contribution(planner, round_number, payloads)
            encoder.restore_to_residual(round_number, payloads, residual)
        else:
            applied += decode_contribution(planner, round_number, payloads)
    torch.testing.assert_close(applied + residual, everything, rtol=1e-5, atol=1e-7)
    # The control: if it had not been restored, that round would be missing.
    assert dropped.any() and not torch.allclose(applied + residual - dropped, everything, atol=1e-5)


@each_round
def test_restoring_undoes_a_contribution_of_progress_only(recipe: str, round_number: int) -> None:
    planner = make_planner(recipe)
    method, mask = planner.method.at_round(round_number), sent_mask(planner, round_number).bool()
    encoder, residual = ContributionEncoder(planner), random_values(0, planner.signal_numel)
    expected = residual * method.feedback.decay + random_values(1, planner.signal_numel)
    payloads = encode(encoder, round_number, random_values(1, planner.signal_numel), residual)
    after, contribution = residual.clone(), decode_contribution(planner, round_number, payloads)
    encoder.restore_to_residual(round_number, payloads, residual)
    if not method.signal.is_delta:
        assert torch.equal(residual, after), "absolute values are not restored"
    elif method.feedback.keeps_error:
        torch.testing.assert_close(residual[mask], expected[mask], rtol=1e-5, atol=1e-8)
    else:
        torch.testing.assert_close(residual[mask], contribution[mask], rtol=1e-5, atol=1e-8)
    assert torch.equal(residual[~mask], after[~mask])


def test_residual_over_rounds_is_the_decayed_sum() -> None:
    planner = make_planner("sparseloco", {"codec": {"k": 16}})
    encoder, residual, left = ContributionEncoder(planner), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for round_number in range(10):
        left = 0.95 * left + random_values(round_number)
        left = left - decode_contribution(
            planner, round_number, encode(encoder, round_number, random_values(round_number), residual)
        )
    assert torch.allclose(left, residual, rtol=1e-4, atol=1e-8)


def test_with_a_share_the_residual_keeps_the_rest() -> None:
    planner = make_planner("sparseloco", LOSSLESS | {"feedback": {"kind": "error", "decay": 1.0, "share": 0.25}})
    residual = torch.zeros(NUMEL)
    payloads = encode(ContributionEncoder(planner), 0, random_values(1), residual)
    torch.testing.assert_close(residual, 0.75 * random_values(1))
    ContributionEncoder(planner).restore_to_residual(0, payloads, residual)
    torch.testing.assert_close(residual, random_values(1))


def test_without_error_feedback_most_progress_is_lost() -> None:
    """A constant pseudo-gradient over 100 rounds of top-k with 64 of 4096."""
    constant, arrived = random_values(5), {}
    for feedback in ("error", "none"):
        planner = make_planner("sparseloco", {"feedback": {"kind": feedback}})
        encoder, residual, total = ContributionEncoder(planner), torch.zeros(NUMEL), torch.zeros(NUMEL)
        for round_number in range(100):
            total += decode_contribution(planner, round_number, encode(encoder, round_number, constant, residual))
        arrived[feedback] = float(torch.dot(total, constant) / torch.dot(constant, constant)) / 100
    assert arrived["error"] > 0.45
    assert arrived["none"] < 0.15


@each_recipe
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_progress_that_is_not_finite_is_refused(recipe: str, bad: float) -> None:
    planner = make_planner(recipe)
    delta, residual = random_values(1, planner.signal_numel), random_values(0, planner.signal_numel)
    delta[planner.plan(0).spans[-1][1] - 1] = bad
    with pytest.raises(CodecError):
        encode(ContributionEncoder(planner), 0, delta, residual)


@each_recipe
def test_replicas_stay_equal_over_twenty_rounds(recipe: str) -> None:
    """Members change from round to round, and the replicas run with different numbers of threads."""
    planner = make_planner(recipe)
    members, rounds = [FakePeer(planner) for _ in range(3)], []
    for round_number in range(20):
        contributions = [member.encode(round_number, 10 * round_number + i) for i, member in enumerate(members)]
        included = [i for i in range(3) if (round_number + i) % 4]
        for i in set(range(3)) - set(included):
            members[i].encoder.restore_to_residual(round_number, contributions[i], members[i].residual)
        rounds.append(([contributions[i] for i in included], [1000.0 + i for i in included]))
    replicas, threads = [FakePeer(planner) for _ in range(2)], torch.get_num_threads()
    for count, replica in enumerate(replicas, 1):
        torch.set_num_threads(count)
        for round_number, (contributions, weights) in enumerate(rounds):
            replica.apply(round_number, contributions, weights)
    torch.set_num_threads(threads)
    one, other = replicas
    assert all(torch.equal(*pair) for pair in zip(one.state, other.state, strict=True))
    assert one.anchor.abs().max() > 0 and all(bool(torch.isfinite(vector).all()) for vector in one.state)


@each_recipe
def test_state_survives_a_restart(recipe: str) -> None:
    """The anchor, the slots and the residual are the whole state."""
    planner = make_planner(recipe)
    one, other = FakePeer(planner), FakePeer(make_planner(recipe))
    for round_number in range(3):
        one.apply(round_number, [one.encode(round_number, round_number)], [1])
    other.anchor, other.residual = one.anchor.clone(), one.residual.clone()
    other.slots = {name: slot.clone() for name, slot in one.slots.items()}
    for replica in (one, other):
        replica.apply(3, [replica.encode(3, 3)], [1])
    assert all(torch.equal(*pair) for pair in zip(one.state, other.state, strict=True))
    assert torch.equal(one.residual, other.residual)


@each_recipe
def test_member_of_weight_zero_is_absent(recipe: str) -> None:
    planner = make_planner(recipe)
    members = [FakePeer(planner) for _ in range(4)]
    contributions = [member.encode(0, seed) for seed, member in enumerate(members)]
    weights = [3.0, 0.0, 5.0, 7.0]
    some, without, all_of_them = (FakePeer(planner) for _ in range(3))
    some.apply(0, contributions, weights)
    without.apply(0, [contributions[0], *contributions[2:]], [3.0, 5.0, 7.0])
    all_of_them.apply(0, contributions, [3.0, 4.0, 5.0, 7.0])
    assert torch.equal(some.anchor, without.anchor)
    assert not torch.equal(some.anchor, all_of_them.anchor), "the control: with a weight it changes the result"


@each_recipe
def test_contributions_that_arrive_in_any_order_are_merged_in_the_agreed_one(recipe: str) -> None:
    """Peers receive contributions in different orders, sort them by sender, and compute the same bits."""
    planner = make_planner(recipe)
    named = {f"peer {seed}": FakePeer(planner).encode(0, seed) for seed in range(5)}
    ends = []
    for arrival in (sorted(named), sorted(named, reverse=True), ["peer 2", "peer 0", "peer 4", "peer 1", "peer 3"]):
        held = {name: named[name] for name in arrival}
        replica = FakePeer(planner)
        replica.apply(0, [held[name] for name in sorted(held)], [1.0 + len(name) for name in sorted(held)])
        ends.append(replica.anchor)
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_negative_control_merging_in_order_of_arrival_gives_different_bits() -> None:
    planner, members = make_planner("averaging", LOSSLESS), [random_values(seed) for seed in range(5)]
    contributions = [ContributionEncoder(planner).encode(0, member.clone(), torch.zeros(NUMEL)) for member in members]
    forward, backward = FakePeer(planner), FakePeer(planner)
    forward.apply(0, contributions, [1.0] * 5)
    backward.apply(0, contributions[::-1], [1.0] * 5)
    assert not torch.equal(forward.anchor, backward.anchor)


def test_growing_momentum_changes_the_step_equally_on_two_replicas() -> None:
    growing, constant = ({"update": {"momentum": momentum}} | LOSSLESS for momentum in (curve(0.0, 0.9, 4), 0.0))
    ends = []
    for tables in (growing, growing, constant):
        replica = FakePeer(make_planner("diloco", tables))
        path = []
        for round_number in range(6):
            replica.apply(
                round_number,
                [ContributionEncoder(replica.planner).encode(round_number, torch.ones(NUMEL), torch.zeros(NUMEL))],
                [1],
            )
            path.append(float(replica.anchor[0]))
        ends.append(path)
    assert ends[0] == ends[1]
    expected, momentum, phi = [], 0.0, 0.0
    for round_number in range(6):
        share = 0.9 * min(1.0, round_number / 4)
        momentum = share * momentum + 1
        phi -= 0.7 * (1 + share * momentum)
        expected.append(phi)
    assert ends[0] == pytest.approx(expected, rel=1e-5)
    assert ends[2] == pytest.approx([-0.7 * (round_number + 1) for round_number in range(6)], rel=1e-5)


def test_averaging_lands_on_the_mean_of_the_weights() -> None:
    replica = FakePeer(make_planner("averaging", LOSSLESS))
    replica.anchor[:] = random_values(9)
    weights = [random_values(i) for i in range(4)]
    contributions = [replica.encoder.encode(0, random_values(9) - weight, torch.zeros(NUMEL)) for weight in weights]
    replica.apply(0, contributions, [1] * 4)
    assert torch.allclose(replica.anchor, torch.stack(weights).mean(0), rtol=1e-5, atol=1e-8)


def test_periods_of_one_average_weights_and_both_moments() -> None:
    signal: Tables = {"signal": {"kind": "inner-state", "first_every": 1, "second_every": 1}}
    replica = FakePeer(make_planner("averaging", LOSSLESS | NO_PROGRESS | signal))
    reference = random_values(9, 3 * NUMEL)
    for vector, part in zip(
        (replica.anchor, *(replica.slots[n] for n in replica.planner.method.signal.averaged_names)),
        torch.split(reference, NUMEL),
        strict=True,
    ):
        vector.copy_(part)
    live = [random_values(i, 3 * NUMEL) for i in range(4)]
    contributions = [replica.encoder.encode(0, reference - own, torch.zeros(3 * NUMEL)) for own in live]
    replica.apply(0, contributions, [1] * 4)
    after = torch.cat([replica.anchor, replica.slots["first_moment"], replica.slots["second_moment"]])
    torch.testing.assert_close(after, torch.stack(live).mean(0), rtol=1e-5, atol=1e-8)


def test_topk_that_keeps_everything_is_diloco_without_momentum() -> None:
    """k = chunk, no decay: the two levels represent the values exactly."""
    levels = [torch.sign(random_values(i)) * 2.0**-8 for i in range(3)]
    options: Tables = {"codec": {"k": 4096}, "aggregate": {"clip": False}}
    plain: Tables = LOSSLESS | {"update": {"learning_rate": 1.0, "momentum": 0.0}}
    results = []
    for planner in (make_planner("sparseloco", options), make_planner("diloco", plain)):
        replica = FakePeer(planner)
        contributions = [replica.encoder.encode(0, level.clone(), torch.zeros(NUMEL)) for level in levels]
        replica.apply(0, contributions, [1, 2, 3])
        results.append(replica.anchor)
    assert torch.equal(results[0], results[1])


@each_recipe
def test_identical_members_count_as_one(recipe: str) -> None:
    results = []
    for members in (1, 4):
        replica = FakePeer(make_planner(recipe))
        contribution = replica.encode(0, 3)
        replica.apply(0, [contribution] * members, [7.0] * members)
        results.append(replica.anchor)
    assert torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-8)


@each_round
def test_merged_vector_is_near_the_exact_mean(recipe: str, round_number: int) -> None:
    replica = FakePeer(make_planner(recipe, UNCLIPPED))
    contributions = [
        replica.encoder.encode(
            round_number, random_values(i, len(replica.residual)), torch.zeros(len(replica.residual))
        )
        for i in range(3)
    ]
    merged = replica.aggregate(round_number, contributions, [1, 2, 5])
    exact = sum(
        decode_contribution(replica.planner, round_number, contribution) * weight
        for contribution, weight in zip(contributions, (1, 2, 5), strict=True)
    )
    gathered = replica.planner.plan(round_number).gather(torch.as_tensor(exact)) / 8
    # The reduced parts are encoded once more; if each contribution has four bits, so has their mean.
    assert torch.linalg.vector_norm(merged - gathered) < 0.25 * torch.linalg.vector_norm(gathered)


@each_round
def test_every_part_is_checked(recipe: str, round_number: int) -> None:
    planner = make_planner(recipe)
    aggregator, plan, payloads = (
        Aggregator(planner),
        planner.plan(round_number),
        FakePeer(planner).encode(round_number, 0),
    )
    assert len(payloads) == len(plan.part_spans) == (PART_COUNT if plan.method.topology.kind == "butterfly" else 1)
    for part, payload in enumerate(payloads):
        assert len(payload) <= plan.max_sizes[part]
        aggregator.decode_part(round_number, payload, part)
        with pytest.raises(CodecError):
            aggregator.decode_part(round_number, bytes(payload) + b"\0", part)


def test_payload_of_another_fragment_is_refused() -> None:
    planner = make_planner("averaging", {"schedule": {"inner_steps": 30, "fragments": 2, "pattern": "contiguous"}})
    payloads = FakePeer(planner).encode(0, 0)
    Aggregator(planner).decode_part(0, payloads[0], 0)
    with pytest.raises(CodecError):
        Aggregator(planner).decode_part(1, payloads[0], 0)


@pytest.mark.parametrize("topology", ["butterfly", "gather"])
@pytest.mark.parametrize("codec", [kind for kind in CODECS if CODECS[kind].is_contractive])
def test_every_codec_keeps_replicas_equal_and_conserves_progress(codec: str, topology: str) -> None:
    """With error feedback, sent values and residual sum to all progress, also after a contribution was excluded."""
    planner = make_planner("averaging", {"codec": {"kind": codec}, "topology": {"kind": topology}})
    replicas = [FakePeer(planner) for _ in range(3)]
    arrived = torch.zeros(NUMEL)
    for round_number in range(4):
        contributions = [replica.encode(round_number, 10 * round_number + i) for i, replica in enumerate(replicas)]
        if round_number == 2:
            replicas[0].encoder.restore_to_residual(round_number, contributions[0], replicas[0].residual)
        else:
            arrived += decode_contribution(planner, round_number, contributions[0])
        included = contributions[round_number == 2 :]
        for replica in replicas:
            replica.apply(round_number, included, [5.0] * len(included))
    made = sum((random_values(10 * round_number) for round_number in range(4)), torch.zeros(NUMEL))
    assert torch.allclose(arrived + replicas[0].residual, made, rtol=1e-4, atol=1e-7)
    assert torch.equal(replicas[0].anchor, replicas[1].anchor) and torch.equal(replicas[0].anchor, replicas[2].anchor)
    assert replicas[0].anchor.abs().max() > 0


def test_bits_per_parameter_of_recipes() -> None:
    assert compose("sparseloco").codec.bits_per_parameter(10**6) <= 0.16
    assert compose("diloco").codec.bits_per_parameter(10**6) < 8.1
    assert ChunkTopK(k=512).bits_per_parameter(10**6) < 0.85
