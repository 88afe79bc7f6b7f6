"""Each expert is the mean of those who sent it, and one that nobody sent does not move."""

from collections.abc import Sequence

import pytest
import torch

from optim.compose import compose
from optim.errors import UnknownOption
from optim.exchange import ContributionEncoder
from optim.layout import Layout
from optim.round_plan import RoundPlanner
from tests.optim.fake_peers import FakePeer, Tables, constant, encode

MIXTURE = Layout(((20, 30), *((8, 30),) * 6, (50,)), (0, *(1,) * 3, *(2,) * 3, 3), (-1, 0, 1, 2, 0, 1, 2, -1))
SPANS = MIXTURE.expert_spans
TRAINED: Tables = {"schedule": {"experts": "trained"}}
LOSSLESS: Tables = {"codec": {"kind": "none"}, "update": {"kind": "sgd", "learning_rate": 1.0}}
MEAN: Tables = {"aggregate": {"kind": "mean"}}
RULES: dict[str, Tables] = {
    "mean": MEAN,
    "clipped": {"aggregate": {"kind": "mean", "clip": True}},
    "equal": {"aggregate": {"kind": "mean", "weights": "equal", "over": "members"}},
    "senders": {"aggregate": {"kind": "sender-mean"}},
    "filtered": {"aggregate": {"kind": "filtered"}},
}
FLAGS = [[True, False, True, False, True, False], [True, False, False, True, True, False], [True] * 5 + [False]]
WEIGHTS = [100.0, 300.0, 200.0]


def planner_of(topology: str, *tables: Tables, parts: int = 3) -> RoundPlanner:
    merged: Tables = {**LOSSLESS, "topology": {"kind": topology}}
    for table in tables:
        merged |= table
    return RoundPlanner(compose("diloco", merged), MIXTURE, parts)


def deltas(members: int) -> list[torch.Tensor]:
    """Return deltas that point to one side, so that no rule leaves one out."""
    common = torch.randn(MIXTURE.numel, generator=torch.Generator().manual_seed(9))
    noise = (torch.randn(MIXTURE.numel, generator=torch.Generator().manual_seed(seed)) for seed in range(members))
    return [(common + 0.1 * one) * 1e-3 for one in noise]


def merge(planner: RoundPlanner, flags: Sequence[Sequence[bool]]) -> torch.Tensor:
    """Return the merged vector of a round of three members."""
    peer, encoder = FakePeer(planner), ContributionEncoder(planner)
    payloads = [
        encoder.encode(0, delta.clone(), torch.zeros(MIXTURE.numel), one)
        for delta, one in zip(deltas(len(flags)), flags, strict=True)
    ]
    return peer.aggregate(0, payloads, [planner.method.aggregate.weigh(int(tokens), 0) for tokens in WEIGHTS])


def weighted_mean(vectors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return sum((vector * weight for vector, weight in zip(vectors, weights, strict=True)), torch.zeros(())) / sum(
        weights
    )


@pytest.mark.parametrize("topology", ["gather", "butterfly"])
def test_each_expert_is_the_mean_of_its_senders(topology: str) -> None:
    merged, made = merge(planner_of(topology, MEAN, TRAINED), FLAGS), deltas(3)
    for number, (start, stop) in enumerate(SPANS):
        pieces = [delta[start:stop] for delta in made]
        weights = [weight * flags[number] for weight, flags in zip(WEIGHTS, FLAGS, strict=True)]
        if not any(weights):
            assert not merged[start:stop].any()
            continue
        torch.testing.assert_close(merged[start:stop], weighted_mean(pieces, weights), rtol=1e-4, atol=1e-9)
        # The control: the plain mean has what was not sent as zeros.
        diluted = weighted_mean([piece * flags[number] for piece, flags in zip(pieces, FLAGS, strict=True)], WEIGHTS)
        assert all(weights) or not torch.allclose(merged[start:stop], diluted, rtol=0.05)
    torch.testing.assert_close(
        merged[:600], weighted_mean([delta[:600] for delta in made], WEIGHTS), rtol=1e-4, atol=1e-9
    )


@pytest.mark.parametrize("topology", ["gather", "butterfly"])
@pytest.mark.parametrize("rule", RULES)
def test_nothing_changes_where_all_send_all_experts(rule: str, topology: str) -> None:
    everything = [[True] * len(SPANS)] * 3
    with_option = merge(planner_of(topology, RULES[rule], TRAINED), everything)
    assert torch.equal(with_option, merge(planner_of(topology, RULES[rule]), everything))


@pytest.mark.parametrize("rule", RULES)
def test_experts_have_the_length_of_those_of_their_senders_by_every_rule(rule: str) -> None:
    merged, everything = merge(planner_of("gather", RULES[rule], TRAINED), FLAGS), deltas(3)[0]
    for start, stop in SPANS[:-1]:
        assert 0.8 < merged[start:stop].norm() / everything[start:stop].norm() < 1.2


@pytest.mark.parametrize("topology", ["gather", "butterfly"])
def test_an_expert_that_nobody_sent_does_not_move(topology: str) -> None:
    """Even with momentum. The control: all of them move where all are sent."""
    momentum: Tables = {"update": {"kind": "nesterov"}}
    peer = FakePeer(planner_of(topology, MEAN, TRAINED, momentum))
    for round_number, flags in enumerate(([True] * 6, FLAGS[0])):
        payloads = [peer.encoder.encode(round_number, delta, torch.zeros(MIXTURE.numel), flags) for delta in deltas(3)]
        before, slots = peer.anchor, peer.slots
        peer.apply(round_number, payloads, WEIGHTS)
        for (start, stop), is_sent in zip(SPANS, flags, strict=True):
            assert bool((peer.anchor != before)[start:stop].any()) == is_sent
            assert bool((peer.slots["momentum"] != slots["momentum"])[start:stop].any()) == is_sent


@pytest.mark.parametrize("topology", ["gather", "butterfly"])
@pytest.mark.parametrize("feedback", ["none", "error"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_what_is_not_sent_is_kept_and_sent_later(topology: str, feedback: str, fragments: int) -> None:
    schedule: Tables = {"schedule": {"experts": "trained", "fragments": fragments, "experts_every": 2}}
    planner = planner_of(topology, schedule, {"feedback": {"kind": feedback}})
    encoder, residual = ContributionEncoder(planner), torch.zeros(MIXTURE.numel)
    applied, everything = torch.zeros(MIXTURE.numel), torch.zeros(MIXTURE.numel)
    cycle = len(planner.cycle)
    for round_number in range(2 * cycle):
        plan, delta = planner.plan(round_number), torch.zeros(MIXTURE.numel)
        for start, stop in plan.spans:
            delta[start:stop] = deltas(1)[0][start:stop]
        everything += delta
        flags = FLAGS[0] if round_number < cycle else [True] * 6
        payloads = encode(encoder, round_number, delta, residual, flags)
        sent = torch.cat([c.decode(p, b - a) for p, (c, (a, b)) in zip(payloads, plan.parts, strict=True)])
        whole = torch.zeros(MIXTURE.numel)
        plan.scatter(sent, whole)
        applied += whole
        if round_number == cycle - 1:
            assert residual.any()
    torch.testing.assert_close(applied, everything, rtol=1e-5, atol=1e-8)
    assert not residual.any()


REFUSED: list[tuple[str, Tables, str]] = [
    ("diloco", {"aggregate": {"kind": "median"}}, "aggregate 'median' cannot combine"),
    ("local-adam", {}, "signal 'inner-state' is sent whole"),
    ("diloco", {"update": {"kind": "adam"}}, "update 'adam' counts its steps"),
    ("diloco", {"codec": {"kind": "subset"}}, "different values by codec 'subset'"),
]


@pytest.mark.parametrize(("recipe", "tables", "reason"), REFUSED, ids=str)
def test_methods_that_cannot_leave_experts_out_are_refused(recipe: str, tables: Tables, reason: str) -> None:
    compose(recipe, tables)
    with pytest.raises(UnknownOption, match=rf"^schedule\.experts: .*{reason}") as caught:
        compose(recipe, tables | TRAINED)
    assert "\n" not in str(caught.value)


def test_the_model_must_have_experts_and_the_option_must_not_change() -> None:
    with pytest.raises(UnknownOption, match=r"^schedule\.experts = 'trained': the model has no experts"):
        RoundPlanner(compose("diloco", TRAINED), Layout(((3, 4),)), 1)
    with pytest.raises(UnknownOption, match=r"^schedule\.experts must not change"):
        planner_of("gather", {"schedule": {"experts": [constant("all", 3), "trained"]}})
