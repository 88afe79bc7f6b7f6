"""The final anneal: the learning rate falls in the last part of a run, for all peers alike, and follows the target."""

from pathlib import Path

import pytest

from node.data import open_corpus
from node.from_manifest import build_program, rate_of_outer_steps
from node.loop.steering import unsteered
from node.simulation.comparison import run_simulation
from node.simulation.config import SimulationConfig, default_manifest
from node.simulation.measurement import Evaluator
from node.step_settings import StepSettings, step_settings
from optim.compose import compose
from protocol.errors import ManifestError
from protocol.manifest.run import Manifest
from protocol.steering import revise
from tests.node.test_from_manifest import manifest_of

PEAK = 1e-2


def annealed(recipe: str = "diloco", share: float = 0.2, final: float = 0.0, target: str = "rounds = 100") -> Manifest:
    return manifest_of(recipe, f"[anneal]\nshare = {share}\nfinal_share = {final}\n[target]\n{target}")


def rate(manifest: Manifest, rounds: int, tokens: int = 0) -> float:
    return step_settings(manifest, rounds, tokens).train.learning_rate


@pytest.mark.parametrize(
    ("final", "rounds", "expected"),
    [(0.0, 0, 1.0), (0.0, 80, 1.0), (0.0, 90, 0.5), (0.0, 99, 0.05), (0.1, 90, 0.55), (0.1, 100, 0.1), (1.0, 99, 1.0)],
)
def test_rate_falls_to_its_end_value_in_the_last_part(final: float, rounds: int, expected: float) -> None:
    assert rate(annealed(final=final), rounds) == pytest.approx(PEAK * expected)


def test_rate_falls_by_tokens_where_the_target_is_in_tokens() -> None:
    manifest = annealed(target="tokens = 1000")
    assert rate(manifest, 10**6, 900) == pytest.approx(PEAK / 2)
    both = annealed(target="tokens = 1000\nrounds = 100")
    assert rate(both, 95, 0) == pytest.approx(PEAK / 4), "the first target to be reached ends the run"


def test_rate_is_never_zero_and_settings_reach_the_trainer() -> None:
    """A trainer refuses a rate of zero, and a run that is over may go on with a later target."""
    settings = step_settings(annealed(), 500, 0)
    assert 0 < settings.train.learning_rate < 1e-5 * PEAK
    assert StepSettings.model_validate_json(settings.model_dump_json()) == settings


def test_later_target_moves_the_anneal() -> None:
    manifest = annealed()
    assert rate(manifest, 95) == pytest.approx(PEAK / 4)
    extended = revise(manifest, {"target.rounds": 200})
    assert rate(extended, 95) == PEAK and rate(extended, 180) == pytest.approx(PEAK / 2)
    assert rate(revise(manifest, {"anneal.share": 0.5}), 75) == pytest.approx(PEAK / 2)
    assert rate(revise(manifest, {"target.rounds": None}), 95) == PEAK, "without an end there is no last part"


def test_outer_optimizer_that_replaces_the_inner_one_has_the_same_factor() -> None:
    manifest = annealed("data-parallel")
    program = build_program(manifest)
    factor = rate_of_outer_steps(unsteered(manifest), program)
    assert factor(90, 90, 0) == pytest.approx(rate(manifest, 90) / PEAK) == pytest.approx(0.5)
    assert factor(3, 90, 0) == pytest.approx(0.5), "void rounds make no step, and count for the target"


def test_anneal_needs_an_end() -> None:
    with pytest.raises(ManifestError, match=r"anneal.share: .* set target.tokens or target.rounds"):
        build_program(annealed(target=""))
    build_program(annealed(share=0.0, target=""))


def test_run_without_an_anneal_keeps_its_id() -> None:
    plain = manifest_of()
    assert plain.run_id == manifest_of(tables="[anneal]\nshare = 0.0").run_id
    assert plain.run_id != annealed().run_id and "anneal" not in plain.canonical().decode()


def test_virtual_peers_have_one_rate_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is that of the simulated run."""
    steps, peers, rates = 8, 2, dict[int, list[float]]()
    manifest = default_manifest(steps)
    manifest = manifest.model_copy(update={"anneal": manifest.anneal.model_copy(update={"share": 0.5})})

    def note(manifest: Manifest, rounds: int, tokens: int) -> StepSettings:
        settings = step_settings(manifest, rounds, tokens)
        rates.setdefault(rounds, []).append(settings.train.learning_rate / manifest.train.learning_rate)
        return settings

    monkeypatch.setattr(Evaluator, "loss", lambda *_: 0.0)
    for module in ("swarm", "virtual.peer"):
        monkeypatch.setattr(f"node.simulation.{module}.step_settings", note)
    config = SimulationConfig(manifest, Path(), peers, steps, (1.0,) * peers, (1e6,) * peers, 0.05)
    corpus = open_corpus(manifest.data, Path())
    method = compose("averaging", {"schedule": {"inner_steps": 2}})
    run_simulation(config, method, corpus, Evaluator(config, corpus), 1, lambda: None)
    assert {number: set(seen) for number, seen in rates.items() if number < 4} == {0: {1}, 1: {1}, 2: {1}, 3: {0.5}}
    assert all(len(seen) == peers for seen in rates.values())
