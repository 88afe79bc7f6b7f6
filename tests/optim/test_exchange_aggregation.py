"""Every aggregation rule in whole exchanges, by parts and on whole vectors."""

import pytest
import torch

from optim.compose import AGGREGATION_RULES, OUTER_OPTIMIZERS
from optim.errors import CodecError, OptimError
from optim.exchange import Aggregator
from optim.recipes import RECIPES
from tests.optim.fake_peers import (
    LOSSLESS,
    NUMEL,
    FakePeer,
    make_planner,
    new_slots,
    random_values,
)

each_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.mark.parametrize("aggregate", AGGREGATION_RULES)
@pytest.mark.parametrize(
    "update", [kind for kind in OUTER_OPTIMIZERS if "pseudo-gradient" in OUTER_OPTIMIZERS[kind].signals]
)
def test_every_aggregation_rule_works_with_every_outer_optimizer(aggregate: str, update: str) -> None:
    planner = make_planner("averaging", {"aggregate": {"kind": aggregate}, "update": {"kind": update}})
    replicas = [FakePeer(planner) for _ in range(2)]
    for round_number in range(2):
        contributions = [
            replicas[0].encoder.encode(round_number, random_values(i + round_number), torch.zeros(NUMEL))
            for i in range(5)
        ]
        for replica in replicas:
            replica.apply(round_number, contributions, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert torch.equal(replicas[0].anchor, replicas[1].anchor) and replicas[0].anchor.abs().max() > 0


@pytest.mark.parametrize("aggregate", ["median", "trimmed-mean"])
def test_rules_by_coordinate_give_the_same_by_parts(aggregate: str) -> None:
    merged = []
    for topology in ("butterfly", "gather"):
        tables = LOSSLESS | {"aggregate": {"kind": aggregate}, "topology": {"kind": topology}}
        replica = FakePeer(make_planner("averaging", tables))
        contributions = [replica.encoder.encode(0, random_values(i), torch.zeros(NUMEL)) for i in range(5)]
        merged.append(replica.apply(0, contributions, [1.0] * 5))
    assert torch.equal(*merged)


@pytest.mark.parametrize("aggregate", ["krum", "centred-clip"])
def test_rules_on_whole_vectors_judge_each_part_of_a_butterfly_separately(aggregate: str) -> None:
    """Each of three byzantine members attacks one part only, so every part has one, but whole vectors three of five."""
    planner = make_planner("averaging", LOSSLESS | {"aggregate": {"kind": aggregate}})
    replica, truth = FakePeer(planner), random_values(0)
    contributions = [truth + 0.1 * random_values(i + 1) for i in range(5)]
    for liar, (start, stop) in enumerate(planner.plan(0).part_spans):
        contributions[liar][start:stop] *= -10
    merged = replica.apply(
        0,
        [replica.encoder.encode(0, contribution.clone(), torch.zeros(NUMEL)) for contribution in contributions],
        [1.0] * 5,
    )
    assert torch.linalg.vector_norm(merged - truth) < 0.2 * torch.linalg.vector_norm(truth)


def test_merge_of_too_few_parts_is_refused() -> None:
    planner = make_planner("diloco")
    payloads = FakePeer(planner).encode(0, 0)
    with pytest.raises(CodecError, match="2 reduced parts where there are 3"):
        Aggregator(planner).merge(0, payloads[:2], (), new_slots())


@each_recipe
def test_merge_without_members_is_refused(recipe: str) -> None:
    replica = FakePeer(make_planner(recipe))
    with pytest.raises(OptimError):
        replica.aggregate(0, [replica.encode(0, 0)], [0.0])
