"""`murmur sim` and `murmur recipes`, from their words to what they print."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from node.recipes_command import describe_recipe, show_recipes
from node.simulation import command
from node.simulation.adversary import Adversaries
from node.simulation.command import SimulationOptions, build_config, compose_methods, parse_overrides, simulate
from optim.compose import COMPONENTS
from optim.recipes import RECIPES
from protocol.errors import MurmurError, StorageError, UsageError
from tests.node.simulation.virtual_swarm import make_config

WISH = SimulationOptions(recipes=("diloco",))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    small = make_config(2, 4).manifest
    model, data = small.model.model_copy(update={"vocabulary": 256}), small.data.model_copy(update={"path": "*.txt"})
    path = tmp_path / "run.toml"
    path.write_text(small.model_copy(update={"model": model, "data": data}).to_toml())
    return path


def test_a_comparison_as_json_with_charts(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wish = replace(
        WISH, peers=2, steps=4, seeds=1, run=manifest, overrides=("schedule.inner_steps=2",), json=True,
        plot=manifest.parent / "plot.svg",
    )  # fmt: skip
    simulate(wish)
    figures = json.loads(capsys.readouterr().out)["recipes"]
    assert set(figures) == {"diloco", "data-parallel", "local"}
    assert figures["diloco"]["rounds"] == 2
    assert (manifest.parent / "plot.svg").read_text().startswith("<svg")


def test_a_chart_that_cannot_be_written_costs_no_table(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        simulate(replace(WISH, peers=2, steps=4, seeds=1, run=manifest, plot=manifest.parent))
    assert "data-parallel" in capsys.readouterr().out


def test_a_comparison_for_people(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(replace(WISH, peers=2, steps=4, seeds=1, run=manifest))
    printed = capsys.readouterr()
    assert "data-parallel" in printed.out and "rounds' logic" in printed.out
    assert "inner steps" in printed.err


def test_what_is_settled() -> None:
    given = build_config(
        replace(WISH, peers=2, tokens=10_240, speeds="1,0.5", bandwidth="8", latency=20.0, liars="0.5:zero", churn=0.1)
    )
    assert (given.steps, given.speeds, given.bandwidths) == (10, (1.0, 0.5), (1e6, 1e6))
    assert (given.latency, given.churn, given.adversaries) == (0.02, 0.1, Adversaries(0.5, "zero"))
    assert given.manifest.train.decay_steps == 10


def test_the_manifests_own_options_go_with_its_own_recipe() -> None:
    manifest = make_config(2, 4).manifest
    table = manifest.method.model_copy(update={"schedule": {"inner_steps": 7}})
    methods = compose_methods(
        ["diloco", "averaging", "local"],
        manifest.model_copy(update={"method": table}),
        {"schedule": {"ahead": 5}},
    )
    assert set(methods) == {"diloco", "averaging"}
    assert methods["diloco"].schedule.inner_steps == 7
    assert methods["averaging"].schedule.inner_steps != 7
    assert methods["diloco"].schedule.ahead == methods["averaging"].schedule.ahead == 5


def test_options_are_read_as_in_a_manifest() -> None:
    options = (
        "codec.k=128", "codec.kind=topk", "aggregate.clip=true", 'update.kind="sgd"', "update.rate=1e-2",
        "feedback.decay={ start = 0.5, end = 0.9, rounds = 20 }", "schedule.inner_steps=[{ value = 1, rounds = 5 }, 9]",
    )  # fmt: skip
    assert parse_overrides(options) == {
        "codec": {"k": 128, "kind": "topk"},
        "aggregate": {"clip": True},
        "update": {"kind": "sgd", "rate": 0.01},
        "feedback": {"decay": {"start": 0.5, "end": 0.9, "rounds": 20}},
        "schedule": {"inner_steps": [{"value": 1, "rounds": 5}, 9]},
    }


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: build_config(replace(WISH, steps=1, tokens=1)), "--steps and --tokens both"),
        (lambda: build_config(replace(WISH, speeds="1,2,x")), "--speeds '1,2,x': write numbers"),
        (
            lambda: build_config(replace(WISH, speeds="1,2,3")),
            "--speeds takes one positive number, or one for each of the 8",
        ),
        (lambda: build_config(replace(WISH, bandwidth="0")), "--bandwidth takes one positive"),
        (lambda: build_config(replace(WISH, liars="2:zero")), "--liars '2:zero': write share:kind"),
        (lambda: build_config(replace(WISH, liars="0.1:shout")), "kinds: sign-flip, scale10, zero, random"),
        (
            lambda: build_config(replace(WISH, plot=Path("no/where/plot.svg"))),
            "--plot: there is no folder no/where; make it",
        ),
        (lambda: parse_overrides(["codec=3"]), "--set 'codec=3': write it as part.option=value"),
        (lambda: parse_overrides(["codec.k={ start = 8"]), "--set 'codec.k={ start = 8': not a TOML value: "),
        (
            lambda: simulate(replace(WISH, overrides=("codec.k=[1]",))),
            "codec.k: a list has 2 to 64 phases; write [{ val",
        ),
        (lambda: simulate(replace(WISH, recipes=("dilco",))), "no recipe is called 'dilco'; did you mean 'diloco'?"),
        (lambda: simulate(replace(WISH, overrides=("codec.q=3",))), "has no option 'q'"),
        (lambda: show_recipes("dilco", False), "did you mean 'diloco'?"),
    ],
)
def test_a_wrong_wish_is_one_line(wrong: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrong()
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "has_compiler", lambda: True)
    assert build_config(replace(WISH, compiled=True)).compiled and not build_config(WISH).compiled
    monkeypatch.setattr(command, "has_compiler", lambda: False)
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler"):
        build_config(replace(WISH, compiled=True))


def test_numbers_that_are_none_are_refused() -> None:
    for word in ("nan", "inf", "-1"):
        with pytest.raises(MurmurError):
            build_config(replace(WISH, speeds=word))


def test_the_table_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    show_recipes(None, True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(RECIPES)
    for row in rows:
        assert {"paper", "signal", "schedule", "codec", "topology", "aggregate", "update"} <= row.keys()
    show_recipes(None, False)
    text = capsys.readouterr().out
    assert all(name in text for name in RECIPES)


def test_one_recipe_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    show_recipes("diloco", False)
    text = capsys.readouterr().out
    assert "m <- mu * m + delta;  phi <- phi - eta * (delta + mu * m)" in text
    assert "inner_steps = 100   (default 30)" in text
    row = describe_recipe("diloco")
    assert row["memory_per_parameter"] == 16  # anchor, reference, residual, momentum
    assert row["bits_per_parameter_step"] == pytest.approx(row["bits_per_parameter_sync"] / 100)
    assert row["options"]["update"] == {"learning_rate": 0.7, "momentum": 0.9, "shorten": True}
    assert "fates" in row["needs"]


OPTION = r"    \w+ = [-=.\w\[\]{}, \"]+(   \(default .*\))?"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_part_of_a_recipe_says_what_it_does(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_recipes(recipe, False)
    parts = re.split(r"\n\n(?=\w+ = )", capsys.readouterr().out)
    assert len(parts) == 1 + len(COMPONENTS)
    for part in parts[1:]:
        said = [line for line in part.splitlines()[1:] if line and not re.fullmatch(OPTION, line)]
        assert said, f"only options: {part}"


def test_what_changes_over_the_rounds_is_shown_as_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    show_recipes("sparseloco-warm", False)
    text = capsys.readouterr().out
    assert 'codec = [{ value = "int8", rounds = 50 }, "topk"]' in text
    curve = '{ start = 256, end = 64, rounds = 30, curve = "exponential" }'
    assert f"    k = [{{ value = 256, rounds = 50 }}, {curve}]   (default 64)" in text
    assert "    block = 256\n" in text and "    bits = 2\n" in text, "the options of both kinds"
    assert "round(x / scale)" in text and "The k largest of each chunk" in text, "and what both do"
    assert describe_recipe("sparseloco-warm")["codec"] == [{"value": "int8", "rounds": 50}, "topk"]
    assert describe_recipe("dilocox")["options"]["schedule"]["inner_steps"] == {
        "start": 124, "end": 62, "rounds": 40, "curve": "exponential",
    }  # fmt: skip
    show_recipes(None, False)
    assert re.search(r"sparseloco-warm +int8 then topk \+ residual", capsys.readouterr().out)
