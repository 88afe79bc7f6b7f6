"""The scripts that give the figures of the documentation, on a small model."""

from pathlib import Path

import pytest
import torch

from benchmarks import method_choice, traffic
from node.data import open_source
from node.program import program_of
from optim.recipes import compose
from optim.rows import RECIPES
from protocol.manifest import Manifest, load_manifest

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture
def manifest() -> Manifest:
    torch.set_num_threads(1)
    return method_choice.smaller(load_manifest(CONFIGS / "test.toml"), 6, small=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_traffic_of_every_recipe(manifest: Manifest, recipe: str) -> None:
    """What an upload is beside all-reduce follows from the bits a parameter and the steps of a period."""
    program = program_of(manifest, compose(recipe))
    row = traffic.traffic(program, 2)
    assert row["inner_steps"] == sum(program.plan(number).steps for number in program.cycle)
    # Of two peers each uploads one message: to the other, or half of it and half of what was reduced.
    by_bits = row["bits_per_parameter"] * program.numel / 8 / row["inner_steps"]
    assert row["bytes_a_step"] == pytest.approx(by_bits, rel=0.05)
    assert row["times_less"] == pytest.approx(4 * program.numel / row["bytes_a_step"])


def test_traffic_grows_with_the_swarm_as_the_topology_says(manifest: Manifest) -> None:
    rows = {
        recipe: [traffic.traffic(program_of(manifest, compose(recipe)), peers)["bytes_a_step"] for peers in (2, 5)]
        for recipe in ("diloco", "sparseloco", "noloco")
    }
    assert rows["diloco"][1] == pytest.approx(1.6 * rows["diloco"][0], rel=0.01)
    assert rows["sparseloco"][1] == pytest.approx(4 * rows["sparseloco"][0])
    assert rows["noloco"][1] == rows["noloco"][0]


def test_a_trial_of_a_method(manifest: Manifest) -> None:
    trial = method_choice.Trial(manifest, open_source(manifest.data, CONFIGS), peers=2, steps=6, seed=0)
    start = trial.loss(trial.initial)
    settings = (method_choice.averaging(3), method_choice.averaging(3, delay=1), method_choice.sparse(2, 64, 1.0))
    outcomes = [method_choice.run(trial, setting) for setting in settings]
    assert all(outcome.validation_loss < start + 0.1 for outcome in outcomes)
    assert len({outcome.validation_loss for outcome in outcomes}) == 3
    assert all(outcome.bytes_ratio is not None and outcome.bytes_ratio > 1 for outcome in outcomes)
