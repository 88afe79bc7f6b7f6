"""`murmur sim` and `murmur recipes`, from their arguments to their output."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.commands.recipe_list import LOSSES, RECORDED, Advice, advise, format_list, rank, show_recipes
from node.commands.recipes import describe_recipe, format_recipe
from node.simulation import command
from node.simulation.adversary import Adversaries
from node.simulation.command import SimulationOptions, build_config, compose_methods, simulate
from node.variants import parse_overrides
from optim.compose import COMPONENTS
from optim.recipes import RECIPES
from protocol.errors import MurmurError, StorageError, UsageError
from tests.node.simulation.virtual_swarm import make_config

pytestmark = pytest.mark.slow

OPTIONS = SimulationOptions(recipes=("diloco",))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    small = make_config(2, 4).manifest
    model, data = small.model.model_copy(update={"vocabulary": 256}), small.data.model_copy(update={"path": "*.txt"})
    path = tmp_path / "run.toml"
    path.write_text(small.model_copy(update={"model": model, "data": data}).to_toml())
    return path


def test_comparison_as_json_with_a_plot(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wish = replace(
        OPTIONS, peers=2, steps=4, seeds=1, run=manifest, overrides=("schedule.inner_steps=2",), json=True,
        plot=manifest.parent / "plot.svg",
    )  # fmt: skip
    simulate(wish)
    figures = json.loads(capsys.readouterr().out)["recipes"]
    assert set(figures) == {"diloco", "data-parallel", "local"}
    assert figures["diloco"]["rounds"] == 2
    assert (manifest.parent / "plot.svg").read_text().startswith("<svg")


def test_table_is_printed_although_the_plot_cannot_be_written(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        simulate(replace(OPTIONS, peers=2, steps=4, seeds=1, run=manifest, plot=manifest.parent))
    assert "data-parallel" in capsys.readouterr().out


def test_comparison_for_people(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(2)
    simulate(replace(OPTIONS, peers=2, steps=4, seeds=1, run=manifest))
    assert torch.get_num_threads() == 1, "the losses of a seed depend on no number of cores"
    printed = capsys.readouterr()
    assert "data-parallel" in printed.out and "round machines" in printed.out
    assert "inner steps" in printed.err


def test_pipeline_is_a_row_of_its_own_and_is_compared_with_full_replicas(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = manifest.read_text().replace("layers = 1", "layers = 2").replace("tied = true", "tied = false")
    manifest.write_text(text)
    wish = replace(OPTIONS, peers=4, steps=2, seeds=1, run=manifest, stages=2, overrides=("schedule.inner_steps=2",))
    simulate(wish)
    printed = capsys.readouterr()
    assert re.search(r"diloco, 2 stages: \d\.\d{4} of the loss of full replicas at equal tokens; 16 micro", printed.out)
    assert "20/20" in printed.err, "2 steps of 2 whole peers, of 4 in stages, and of 2 in each baseline"
    simulate(replace(wish, json=True))
    figures = json.loads(capsys.readouterr().out)
    assert list(figures["recipes"]) == ["diloco", "diloco, 2 stages", "data-parallel", "local"]
    assert figures["pipelines"]["diloco, 2 stages"]["microbatches"]["done"] == 16


def test_config_follows_from_the_options() -> None:
    given = build_config(
        replace(
            OPTIONS, peers=2, tokens=10_240, speeds="1,0.5", bandwidth="8", latency=20.0, liars="0.5:zero", churn=0.1
        )
    )
    assert (given.steps, given.speeds, given.bandwidths) == (10, (1.0, 0.5), (1e6, 1e6))
    assert (given.latency, given.churn, given.adversaries) == (0.02, 0.1, Adversaries(0.5, "zero"))
    assert given.manifest.train.decay_steps == 10


def test_manifest_options_apply_to_its_own_recipe() -> None:
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


def test_overrides_are_parsed_as_in_a_manifest() -> None:
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
        (lambda: build_config(replace(OPTIONS, steps=1, tokens=1)), "--steps and --tokens both"),
        (lambda: build_config(replace(OPTIONS, speeds="1,2,x")), "--speeds '1,2,x': write comma-separated numbers"),
        (
            lambda: build_config(replace(OPTIONS, speeds="1,2,3")),
            "--speeds takes one positive number, or one for each of the 8",
        ),
        (lambda: build_config(replace(OPTIONS, bandwidth="0")), "--bandwidth takes one positive"),
        (lambda: build_config(replace(OPTIONS, liars="2:zero")), "--liars '2:zero': write fraction:kind"),
        (lambda: build_config(replace(OPTIONS, liars="0.1:shout")), "kinds: sign-flip, scale10, scale1000"),
        (
            lambda: build_config(replace(OPTIONS, plot=Path("no/where/plot.svg"))),
            "--plot: no/where is not a directory; create it",
        ),
        (
            lambda: build_config(replace(OPTIONS, stages=3)),
            "--peers 8 cannot be divided among 3 stages; give a multiple",
        ),
        (lambda: build_config(replace(OPTIONS, stages=4, liars="0.5:zero")), "--liars and --stages exclude each other"),
        (lambda: parse_overrides(["codec=3"]), "--set 'codec=3': write it as part.option=value"),
        (lambda: parse_overrides(["codec.k={ start = 8"]), "--set 'codec.k={ start = 8': not a TOML value: "),
        (
            lambda: simulate(replace(OPTIONS, overrides=("codec.k=[1]",))),
            "codec.k: a list has 2 to 64 phases; write [{ val",
        ),
        (lambda: simulate(replace(OPTIONS, recipes=("dilco",))), "no recipe is called 'dilco'; did you mean 'diloco'?"),
        (lambda: simulate(replace(OPTIONS, overrides=("codec.q=3",))), "has no option 'q'"),
        (lambda: show_recipes("dilco", False), "did you mean 'diloco'?"),
    ],
)
def test_wrong_option_is_a_one_line_error(wrong: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrong()
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_compiled_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "has_compiler", lambda: True)
    assert build_config(replace(OPTIONS, compiled=True)).compiled and not build_config(OPTIONS).compiled
    monkeypatch.setattr(command, "has_compiler", lambda: False)
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler"):
        build_config(replace(OPTIONS, compiled=True))


def test_invalid_numbers_are_refused() -> None:
    for word in ("nan", "inf", "-1"):
        with pytest.raises(MurmurError):
            build_config(replace(OPTIONS, speeds=word))


def test_table_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    show_recipes(None, True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(RECIPES)
    for row in rows:
        assert {"paper", "signal", "schedule", "codec", "topology", "aggregate", "update"} <= row.keys()
    for parts in (False, True):
        show_recipes(None, False, parts)
        text = capsys.readouterr().out
        assert all(name in text for name in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recorded_figures_are_those_of_new_measurements(recipe: str) -> None:
    """After a change: python -m node.commands.recipes."""
    recorded = {row["name"]: row for row in json.loads(RECORDED.read_text())}
    assert list(recorded) == list(RECIPES)
    row, new = recorded[recipe], describe_recipe(recipe)
    lines = [line for line in format_recipe(new) if not line.startswith("bits per parameter")]
    assert [line for line in row.pop("lines") if not line.startswith("bits per parameter")] == lines
    for figure in ("bits_per_parameter_sync", "bits_per_parameter_step"):
        # an adaptive rank finds its directions with LAPACK, whose last bits depend on the machine
        assert row.pop(figure) == pytest.approx(new.pop(figure), rel=1e-3)
    assert row == json.loads(json.dumps(new))


def test_list_of_recipes_is_readable_at_80_columns_and_says_which_to_take() -> None:
    lines = list(format_list(json.loads(RECORDED.read_text()), 80))
    assert max(map(len, lines)) <= 80 and lines[0].startswith("which to take: frugal")
    assert any(line.startswith("frugal ") and "Signs of the largest" in line for line in lines)
    assert len(lines) < 100


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
def test_every_part_of_a_recipe_is_explained(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_recipes(recipe, False)
    parts = re.split(r"\n\n(?=\w+ = )", capsys.readouterr().out)
    assert len(parts) == 1 + len(COMPONENTS)
    for part in parts[1:]:
        said = [line for line in part.splitlines()[1:] if line and not re.fullmatch(OPTION, line)]
        assert said, f"only options: {part}"


def test_option_that_changes_over_rounds_is_shown_as_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    show_recipes("sparseloco-warm", False)
    text = capsys.readouterr().out
    assert 'codec = [{ value = "int8", rounds = 50 }, "topk"]' in text
    curve = '{ start = 256, end = 64, rounds = 30, curve = "exponential" }'
    assert f"    k = [{{ value = 256, rounds = 50 }}, {curve}]   (default 64)" in text
    assert "    block = 256\n" in text and "    bits = 2\n" in text, "the options of both kinds"
    assert "round(x / scale)" in text and "The k largest values of each chunk" in text, "and what both do"
    assert describe_recipe("sparseloco-warm")["codec"] == [{"value": "int8", "rounds": 50}, "topk"]
    assert describe_recipe("dilocox")["options"]["schedule"]["inner_steps"] == {
        "start": 124, "end": 62, "rounds": 40, "curve": "exponential",
    }  # fmt: skip
    show_recipes(None, False, parts=True)
    assert re.search(r"sparseloco-warm +int8 then topk \+ residual", capsys.readouterr().out)


DEMO = Path(__file__).parents[3] / "configs" / "demo.toml"
RACK = """[[peer]]
name = "rack"
count = 8
tflops = 0.002
up = "100gbit"
down = "100gbit"
memory = "80GB"
device = "cpu"
"""


def test_advice_is_the_least_loss_that_keeps_typical_peers_busy(capsys: pytest.CaptureFixture[str]) -> None:
    advise(DEMO, None, False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "take frugal for demo: typical volunteers compute 100% of the time"
    assert max(map(len, lines)) <= 80 and "peers that never exchange" in " ".join(lines)
    assert any(line.startswith("frugal") and line.endswith("(the run's own)") for line in lines)
    assert not any(line.startswith("data-parallel") for line in lines), "its peers would wait most of the time"


def test_advice_follows_the_peers_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peers.toml").write_text(RACK)
    advise(DEMO, tmp_path / "peers.toml", True)
    found = json.loads(capsys.readouterr().out)
    assert found["take"] in ("data-parallel", "qsdp", "one-bit-adam", "backup-workers")
    assert found["recipes"][0]["busy"] >= 0.9
    assert found["parameters"] == found["recorded"]["parameters"] == 824_448


def test_recipes_that_leave_peers_idle_are_advised_last() -> None:
    best, idle, worse = Advice("b", 0.95, None, 0.3), Advice("i", 0.4, 0.0, 0.0), Advice("w", 0.99, 0.1, 0.5)
    assert rank([idle, worse, best]) == [best, worse, idle]
    slow = [replace(each, busy=each.busy / 2) for each in (idle, worse, best)]
    assert [each.recipe for each in rank(slow)] == ["b", "w", "i"], "of what the busiest reaches"


def test_losses_of_the_advice_are_of_recipes() -> None:
    known = json.loads(LOSSES.read_text())
    assert {*known["losses"]} <= {*RECIPES, "local"} and known["losses"]["data-parallel"]["end"] == 0
    assert known["losses"]["frugal"]["end"] < known["losses"]["local"]["end"]
