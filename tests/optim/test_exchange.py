"""Senders and mergers together: the invariants of whole methods, for every row of the table."""

import pytest
import torch

from optim.codecs.topk import ChunkTopK
from optim.compose import AGGREGATION_RULES, CODECS, OUTER_OPTIMIZERS, compose
from optim.errors import CodecError, OptimError
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
    make_planner,
    random_values,
    sent_mask,
)

DELTAS = [name for name in RECIPES if compose(name).signal.is_delta]
ROUNDS = [
    (recipe, number)
    for recipe in RECIPES
    for number in sorted({*list(make_planner(recipe).cycle)[:6], *make_planner(recipe).method.breakpoints})
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
each_delta = pytest.mark.parametrize("recipe", DELTAS)
each_round = pytest.mark.parametrize(("recipe", "number"), ROUNDS)
FEEDBACKS: Tables = {"error": {"kind": "error", "decay": 1.0}, "none": {"kind": "none"}}
UNCLIPPED: Tables = {"aggregate": {"kind": "mean", "weights": "equal", "over": "weights"}}


@each_round
def test_message_and_residual_hold_all_that_there_was(recipe: str, number: int) -> None:
    """decay * residual_before + delta == share * decoded + residual_after, of what is sent; the rest is left alone."""
    program = make_planner(recipe)
    method, mask = program.method.at_round(number), sent_mask(program, number).bool()
    residual = random_values(0, program.signal_numel)
    expected = residual * method.feedback.decay + random_values(1, program.signal_numel)
    payloads = ContributionEncoder(program).encode(number, random_values(1, program.signal_numel), residual)
    message = decode_contribution(program, number, payloads)
    if method.feedback.keeps_error:
        held = residual + method.feedback.share * message
        torch.testing.assert_close(held[mask], expected[mask], rtol=1e-5, atol=1e-8)
    else:
        assert not residual[mask].any()
    assert torch.equal(residual[~mask], random_values(0, program.signal_numel)[~mask])
    assert (message[~mask] == 0).all()


def test_what_is_left_decays_before_progress_is_added() -> None:
    """Bit for bit: each operation is rounded. What the codec cannot send is all that is left."""
    program = make_planner("sparseloco", {"feedback": {"kind": "error", "decay": 0.9}})
    residual, delta = random_values(0, program.signal_numel), random_values(1, program.signal_numel)
    expected = residual * 0.9
    expected += delta
    message = decode_contribution(program, 0, ContributionEncoder(program).encode(0, delta, residual))
    assert torch.equal(residual, expected - message) and message.any()


@each_delta
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_an_excluded_message_is_sent_again(recipe: str, feedback: str) -> None:
    """Of three cycles a message is dropped: what was applied and what is left still sum to all progress made."""
    program = make_planner(recipe, {"feedback": FEEDBACKS[feedback], **LOSSLESS})
    sender, applied, everything = ContributionEncoder(program), *torch.zeros(2, program.signal_numel)
    residual, dropped = torch.zeros(program.signal_numel), torch.zeros(program.signal_numel)
    for number in range(3 * len(program.cycle)):
        delta = random_values(number, program.signal_numel) * sent_mask(program, number)
        everything += delta
        payloads = sender.encode(number, delta, residual)
        if number == 1:
            dropped = decode_contribution(program, number, payloads)
            sender.restore_to_residual(number, payloads, residual)
        else:
            applied += decode_contribution(program, number, payloads)
    torch.testing.assert_close(applied + residual, everything, rtol=1e-5, atol=1e-7)
    # The control: had it not been taken back, that round would be missing.
    assert dropped.any() and not torch.allclose(applied + residual - dropped, everything, atol=1e-5)


@each_round
def test_taking_back_undoes_a_message_of_progress_and_no_other(recipe: str, number: int) -> None:
    program = make_planner(recipe)
    method, mask = program.method.at_round(number), sent_mask(program, number).bool()
    sender, residual = ContributionEncoder(program), random_values(0, program.signal_numel)
    expected = residual * method.feedback.decay + random_values(1, program.signal_numel)
    payloads = sender.encode(number, random_values(1, program.signal_numel), residual)
    after, message = residual.clone(), decode_contribution(program, number, payloads)
    sender.restore_to_residual(number, payloads, residual)
    if not method.signal.is_delta:
        assert torch.equal(residual, after), "the next message has newer values"
    elif method.feedback.keeps_error:
        torch.testing.assert_close(residual[mask], expected[mask], rtol=1e-5, atol=1e-8)
    else:
        torch.testing.assert_close(residual[mask], message[mask], rtol=1e-5, atol=1e-8)
    assert torch.equal(residual[~mask], after[~mask])


def test_sums_over_rounds_are_the_decayed_sum() -> None:
    program = make_planner("sparseloco", {"codec": {"k": 16}})
    sender, residual, left = ContributionEncoder(program), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number in range(10):
        left = 0.95 * left + random_values(number)
        left = left - decode_contribution(program, number, sender.encode(number, random_values(number), residual))
    assert torch.allclose(left, residual, rtol=1e-4, atol=1e-8)


def test_a_share_taken_off_leaves_the_rest_to_be_sent_again() -> None:
    program = make_planner("sparseloco", LOSSLESS | {"feedback": {"kind": "error", "decay": 1.0, "share": 0.25}})
    residual = torch.zeros(NUMEL)
    payloads = ContributionEncoder(program).encode(0, random_values(1), residual)
    torch.testing.assert_close(residual, 0.75 * random_values(1))
    ContributionEncoder(program).restore_to_residual(0, payloads, residual)
    torch.testing.assert_close(residual, random_values(1))


def test_without_error_feedback_most_of_the_mass_is_lost() -> None:
    """A constant pseudo-gradient over 100 rounds of top-k 64 of 4096."""
    constant, arrived = random_values(5), {}
    for feedback in ("error", "none"):
        program = make_planner("sparseloco", {"feedback": {"kind": feedback}})
        sender, residual, total = ContributionEncoder(program), torch.zeros(NUMEL), torch.zeros(NUMEL)
        for number in range(100):
            total += decode_contribution(program, number, sender.encode(number, constant, residual))
        arrived[feedback] = float(torch.dot(total, constant) / torch.dot(constant, constant)) / 100
    assert arrived["error"] > 0.45
    assert arrived["none"] < 0.15


@each_recipe
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_progress_that_is_not_finite_is_not_sent(recipe: str, bad: float) -> None:
    program = make_planner(recipe)
    delta, residual = random_values(1, program.signal_numel), random_values(0, program.signal_numel)
    delta[program.plan(0).spans[-1][1] - 1] = bad
    with pytest.raises(CodecError):
        ContributionEncoder(program).encode(0, delta, residual)


@each_recipe
def test_replicas_that_see_the_same_messages_stay_equal(recipe: str) -> None:
    """Twenty rounds with changing members; the replicas run with different numbers of threads."""
    program = make_planner(recipe)
    members, rounds = [FakePeer(program) for _ in range(3)], []
    for number in range(20):
        messages = [member.encode(number, 10 * number + i) for i, member in enumerate(members)]
        included = [i for i in range(3) if (number + i) % 4]
        for i in set(range(3)) - set(included):
            members[i].encoder.restore_to_residual(number, messages[i], members[i].residual)
        rounds.append(([messages[i] for i in included], [1000.0 + i for i in included]))
    replicas, threads = [FakePeer(program) for _ in range(2)], torch.get_num_threads()
    for count, replica in enumerate(replicas, 1):
        torch.set_num_threads(count)
        for number, (messages, weights) in enumerate(rounds):
            replica.apply(number, messages, weights)
    torch.set_num_threads(threads)
    one, other = replicas
    assert all(torch.equal(*pair) for pair in zip(one.state, other.state, strict=True))
    assert one.anchor.abs().max() > 0 and all(bool(torch.isfinite(vector).all()) for vector in one.state)


@each_recipe
def test_state_survives_a_restart(recipe: str) -> None:
    """The anchor, the slots and the residual are all the state there is."""
    program = make_planner(recipe)
    one, other = FakePeer(program), FakePeer(make_planner(recipe))
    for number in range(3):
        one.apply(number, [one.encode(number, number)], [1])
    other.anchor, other.residual = one.anchor.clone(), one.residual.clone()
    other.slots = {name: slot.clone() for name, slot in one.slots.items()}
    for replica in (one, other):
        replica.apply(3, [replica.encode(3, 3)], [1])
    assert all(torch.equal(*pair) for pair in zip(one.state, other.state, strict=True))
    assert torch.equal(one.residual, other.residual)


@each_recipe
def test_who_weighs_nothing_is_absent(recipe: str) -> None:
    program = make_planner(recipe)
    members = [FakePeer(program) for _ in range(4)]
    messages = [member.encode(0, seed) for seed, member in enumerate(members)]
    weights = [3.0, 0.0, 5.0, 7.0]
    some, without, all_of_them = (FakePeer(program) for _ in range(3))
    some.apply(0, messages, weights)
    without.apply(0, [messages[0], *messages[2:]], [3.0, 5.0, 7.0])
    all_of_them.apply(0, messages, [3.0, 4.0, 5.0, 7.0])
    assert torch.equal(some.anchor, without.anchor)
    assert not torch.equal(some.anchor, all_of_them.anchor), "the control: with a weight it does change the result"


@each_recipe
def test_messages_arrive_in_any_order_and_are_merged_in_the_agreed_one(recipe: str) -> None:
    """Peers differ in when they hear what; each sorts by sender before it merges, and comes to the same bits."""
    program = make_planner(recipe)
    named = {f"peer {seed}": FakePeer(program).encode(0, seed) for seed in range(5)}
    ends = []
    for arrival in (sorted(named), sorted(named, reverse=True), ["peer 2", "peer 0", "peer 4", "peer 1", "peer 3"]):
        held = {name: named[name] for name in arrival}
        replica = FakePeer(program)
        replica.apply(0, [held[name] for name in sorted(held)], [1.0 + len(name) for name in sorted(held)])
        ends.append(replica.anchor)
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_negative_control_in_the_order_of_arrival_the_bits_differ() -> None:
    program, members = make_planner("averaging", LOSSLESS), [random_values(seed) for seed in range(5)]
    messages = [ContributionEncoder(program).encode(0, member, torch.zeros(NUMEL)) for member in members]
    forward, backward = FakePeer(program), FakePeer(program)
    forward.apply(0, messages, [1.0] * 5)
    backward.apply(0, messages[::-1], [1.0] * 5)
    assert not torch.equal(forward.anchor, backward.anchor)


def test_a_momentum_that_grows_changes_the_update_alike_on_two_replicas() -> None:
    growing, constant = ({"update": {"momentum": momentum}} | LOSSLESS for momentum in (curve(0.0, 0.9, 4), 0.0))
    ends = []
    for tables in (growing, growing, constant):
        replica = FakePeer(make_planner("diloco", tables))
        path = []
        for number in range(6):
            replica.apply(
                number,
                [ContributionEncoder(replica.planner).encode(number, torch.ones(NUMEL), torch.zeros(NUMEL))],
                [1],
            )
            path.append(float(replica.anchor[0]))
        ends.append(path)
    assert ends[0] == ends[1]
    expected, momentum, phi = [], 0.0, 0.0
    for number in range(6):
        share = 0.9 * min(1.0, number / 4)
        momentum = share * momentum + 1
        phi -= 0.7 * (1 + share * momentum)
        expected.append(phi)
    assert ends[0] == pytest.approx(expected, rel=1e-5)
    assert ends[2] == pytest.approx([-0.7 * (number + 1) for number in range(6)], rel=1e-5)


def test_averaging_lands_on_the_mean_of_the_weights() -> None:
    replica = FakePeer(make_planner("averaging", LOSSLESS))
    replica.anchor[:] = random_values(9)
    weights = [random_values(i) for i in range(4)]
    messages = [replica.encoder.encode(0, random_values(9) - weight, torch.zeros(NUMEL)) for weight in weights]
    replica.apply(0, messages, [1] * 4)
    assert torch.allclose(replica.anchor, torch.stack(weights).mean(0), rtol=1e-5, atol=1e-8)


def test_all_periods_of_one_average_weights_and_both_moments() -> None:
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
    messages = [replica.encoder.encode(0, reference - own, torch.zeros(3 * NUMEL)) for own in live]
    replica.apply(0, messages, [1] * 4)
    after = torch.cat([replica.anchor, replica.slots["first_moment"], replica.slots["second_moment"]])
    torch.testing.assert_close(after, torch.stack(live).mean(0), rtol=1e-5, atol=1e-8)


def test_keeping_everything_is_diloco_without_momentum() -> None:
    """k = chunk, no decay: the values themselves are what the two levels carry exactly."""
    levels = [torch.sign(random_values(i)) * 2.0**-8 for i in range(3)]
    options: Tables = {"codec": {"k": 4096}, "aggregate": {"clip": False}}
    plain: Tables = LOSSLESS | {"update": {"learning_rate": 1.0, "momentum": 0.0}}
    results = []
    for program in (make_planner("sparseloco", options), make_planner("diloco", plain)):
        replica = FakePeer(program)
        messages = [replica.encoder.encode(0, level, torch.zeros(NUMEL)) for level in levels]
        replica.apply(0, messages, [1, 2, 3])
        results.append(replica.anchor)
    assert torch.equal(results[0], results[1])


@each_recipe
def test_identical_members_are_one_member(recipe: str) -> None:
    results = []
    for members in (1, 4):
        replica = FakePeer(make_planner(recipe))
        message = replica.encode(0, 3)
        replica.apply(0, [message] * members, [7.0] * members)
        results.append(replica.anchor)
    assert torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-8)


@each_round
def test_what_is_merged_is_near_the_exact_mean(recipe: str, number: int) -> None:
    replica = FakePeer(make_planner(recipe, UNCLIPPED))
    messages = [
        replica.encoder.encode(number, random_values(i, len(replica.residual)), torch.zeros(len(replica.residual)))
        for i in range(3)
    ]
    merged = replica.aggregate(number, messages, [1, 2, 5])
    exact = sum(
        decode_contribution(replica.planner, number, message) * weight
        for message, weight in zip(messages, (1, 2, 5), strict=True)
    )
    gathered = replica.planner.plan(number).gather(torch.as_tensor(exact)) / 8
    # The reduced parts are encoded once more; where each message has four bits, so has their mean.
    assert torch.linalg.vector_norm(merged - gathered) < 0.25 * torch.linalg.vector_norm(gathered)


@each_round
def test_payloads_are_checked_part_by_part(recipe: str, number: int) -> None:
    program = make_planner(recipe)
    merger, plan, payloads = Aggregator(program), program.plan(number), FakePeer(program).encode(number, 0)
    assert len(payloads) == len(plan.part_spans) == (PART_COUNT if plan.method.topology.kind == "butterfly" else 1)
    for part, payload in enumerate(payloads):
        assert len(payload) <= plan.max_sizes[part]
        merger.decode_part(number, payload, part)
        with pytest.raises(CodecError):
            merger.decode_part(number, bytes(payload) + b"\0", part)


def test_a_payload_of_another_fragment_is_refused() -> None:
    program = make_planner("averaging", {"schedule": {"inner_steps": 30, "fragments": 2, "pattern": "contiguous"}})
    payloads = FakePeer(program).encode(0, 0)
    Aggregator(program).decode_part(0, payloads[0], 0)
    with pytest.raises(CodecError):
        Aggregator(program).decode_part(1, payloads[0], 0)


@pytest.mark.parametrize("topology", ["butterfly", "gather"])
@pytest.mark.parametrize("codec", [kind for kind in CODECS if CODECS[kind].is_contractive])
def test_every_codec_keeps_replicas_equal_and_conserves_progress(codec: str, topology: str) -> None:
    """Error feedback: what was sent and what is left are all progress made, also after a message was left out."""
    program = make_planner("averaging", {"codec": {"kind": codec}, "topology": {"kind": topology}})
    replicas = [FakePeer(program) for _ in range(3)]
    arrived = torch.zeros(NUMEL)
    for number in range(4):
        messages = [replica.encode(number, 10 * number + i) for i, replica in enumerate(replicas)]
        if number == 2:
            replicas[0].encoder.restore_to_residual(number, messages[0], replicas[0].residual)
        else:
            arrived += decode_contribution(program, number, messages[0])
        included = messages[number == 2 :]
        for replica in replicas:
            replica.apply(number, included, [5.0] * len(included))
    made = sum((random_values(10 * number) for number in range(4)), torch.zeros(NUMEL))
    assert torch.allclose(arrived + replicas[0].residual, made, rtol=1e-4, atol=1e-7)
    assert torch.equal(replicas[0].anchor, replicas[1].anchor) and torch.equal(replicas[0].anchor, replicas[2].anchor)
    assert replicas[0].anchor.abs().max() > 0


@pytest.mark.parametrize("aggregate", AGGREGATION_RULES)
@pytest.mark.parametrize(
    "update", [kind for kind in OUTER_OPTIMIZERS if "pseudo-gradient" in OUTER_OPTIMIZERS[kind].signals]
)
def test_every_rule_goes_with_every_update(aggregate: str, update: str) -> None:
    program = make_planner("averaging", {"aggregate": {"kind": aggregate}, "update": {"kind": update}})
    replicas = [FakePeer(program) for _ in range(2)]
    for number in range(2):
        messages = [replicas[0].encoder.encode(number, random_values(i + number), torch.zeros(NUMEL)) for i in range(5)]
        for replica in replicas:
            replica.apply(number, messages, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert torch.equal(replicas[0].anchor, replicas[1].anchor) and replicas[0].anchor.abs().max() > 0


@pytest.mark.parametrize("aggregate", ["median", "trimmed-mean"])
def test_by_coordinate_parts_are_as_good_as_the_whole(aggregate: str) -> None:
    merged = []
    for topology in ("butterfly", "gather"):
        tables = LOSSLESS | {"aggregate": {"kind": aggregate}, "topology": {"kind": topology}}
        replica = FakePeer(make_planner("averaging", tables))
        messages = [replica.encoder.encode(0, random_values(i), torch.zeros(NUMEL)) for i in range(5)]
        merged.append(replica.apply(0, messages, [1.0] * 5))
    assert torch.equal(*merged)


@pytest.mark.parametrize("aggregate", ["krum", "centred-clip"])
def test_rules_on_whole_messages_judge_each_part_of_a_butterfly_apart(aggregate: str) -> None:
    """Each of three liars is loud in one part only. Whole messages would show three of five as liars: too many. A
    part shows one."""
    program = make_planner("averaging", LOSSLESS | {"aggregate": {"kind": aggregate}})
    replica, truth = FakePeer(program), random_values(0)
    messages = [truth + 0.1 * random_values(i + 1) for i in range(5)]
    for liar, (start, stop) in enumerate(program.plan(0).part_spans):
        messages[liar][start:stop] *= -10
    merged = replica.apply(
        0, [replica.encoder.encode(0, message, torch.zeros(NUMEL)) for message in messages], [1.0] * 5
    )
    assert torch.linalg.vector_norm(merged - truth) < 0.2 * torch.linalg.vector_norm(truth)


def test_a_merge_of_too_few_parts_is_refused() -> None:
    program = make_planner("diloco")
    payloads = FakePeer(program).encode(0, 0)
    with pytest.raises(CodecError, match="2 reduced parts where there are 3"):
        Aggregator(program).merge(0, payloads[:2], ())


@each_recipe
def test_a_merge_of_nobody_is_refused(recipe: str) -> None:
    replica = FakePeer(make_planner(recipe))
    with pytest.raises(OptimError):
        replica.aggregate(0, [replica.encode(0, 0)], [0.0])


def test_rates_that_the_recipes_promise() -> None:
    assert compose("sparseloco").codec.bits_per_parameter(10**6) <= 0.16
    assert compose("diloco").codec.bits_per_parameter(10**6) < 8.1
    assert ChunkTopK(k=512).bits_per_parameter(10**6) < 0.85
