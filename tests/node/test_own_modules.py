"""Modules of the user: allowed by a person, equal to what the manifest names, and never fetched."""

import json
import os
from pathlib import Path

import pytest

from node.from_manifest import build_method
from node.own_modules import GROUP, VARIABLE, ModuleSource, allow_modules, find_module, own_registry, with_modules
from node.run_file import load_run_file
from node.simulation.command import SimulationOptions, simulate
from node.variants import read_variant
from optim.compose import REGISTRY
from protocol.errors import ComponentError, MurmurError, UsageError
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_method.py"
COMPONENT = """
from typing import ClassVar
from pydantic.dataclasses import dataclass
from optim.options import STRICT
from optim.outer import Sgd

@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mine(Sgd):
    kind: ClassVar[str] = "{kind}"
"""
RUN = """
[run]
name = "own"
[model]
width = 16
layers = 1
heads = 2
hidden = 16
context = 16
[data]
source = "python-stdlib"
[train]
batch_tokens = 64
learning_rate = 3e-3
[method]
recipe = "averaging"
update = {{ kind = "{kind}" }}
modules = ["{module}"]
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def write_module(folder: Path, name: str, kind: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(COMPONENT.format(kind=kind))
    return path


def manifest_with(module: str, kind: str) -> Manifest:
    return parse_manifest(RUN.format(module=module, kind=kind).encode(), "test")


def test_manifest_alone_imports_nothing(tmp_path: Path) -> None:
    path = write_module(tmp_path, "own_a", "a")
    manifest = manifest_with(find_module(str(path)).line, "a")
    with pytest.raises(ComponentError, match=r"never fetches: get its file .* add --import own_a\.py") as fault:
        build_method(manifest)
    assert fault.value.exit_code == 18 and "\n" not in str(fault.value)
    with pytest.raises(ComponentError, match="never fetches"):
        build_method(manifest_with("os " + 64 * "0", "a"))


def test_allowed_module_of_the_run_is_part_of_the_method(tmp_path: Path) -> None:
    (source,) = allow_modules([str(write_module(tmp_path, "own_b", "b"))])
    method = build_method(manifest_with(source.line, "b"))
    assert method.update.kind == "b" and "b" not in REGISTRY["update"]
    assert os.environ[VARIABLE] == str(tmp_path / "own_b.py"), "the trainer inherits it"


def test_module_with_other_content_is_refused_before_it_runs(tmp_path: Path) -> None:
    path = write_module(tmp_path, "own_c", "c")
    (source,) = allow_modules([str(path)])
    manifest = manifest_with(source.line, "c")
    path.write_text("raise SystemExit('it ran')")
    with pytest.raises(ComponentError, match="get the run's file from its organiser"):
        build_method(manifest)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("def", "cannot be imported: SyntaxError"),
        ("x = 1", "defines no component"),
        (COMPONENT.format(kind="sgd"), "rename yours"),
        (COMPONENT.format(kind="d") + "    rate: int", "each option needs a default"),
    ],
)
def test_module_that_cannot_be_used_is_one_line(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / f"own_d{abs(hash(content))}.py"
    path.write_text(content)
    (source,) = allow_modules([str(path)])
    with pytest.raises(ComponentError, match=words) as fault:
        own_registry((source.line,))
    assert "\n" not in str(fault.value)


def test_module_named_like_another_is_refused(tmp_path: Path) -> None:
    (source,) = allow_modules([str(write_module(tmp_path, "json", "e"))])
    with pytest.raises(ComponentError, match="another module is called json already"):
        own_registry((source.line,))
    assert json.loads("1") == 1


@pytest.mark.parametrize("given", ["nowhere.py", "no_such_module_here", "bad-name.py"])
def test_wrong_import_is_one_line(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad-name.py").write_text("")
    with pytest.raises(ComponentError, match="--import"):
        allow_modules([given])


def test_file_of_the_user_gets_the_digest_and_other_runs_keep_their_id(tmp_path: Path) -> None:
    (source,) = allow_modules([str(write_module(tmp_path, "own_f", "f"))])
    run = tmp_path / "run.toml"
    run.write_text(RUN.format(module="own_f", kind="f"))
    manifest = load_run_file(run).manifest
    assert manifest.method.modules == (source.line,)
    plain = manifest.model_copy(update={"method": manifest.method.model_copy(update={"modules": ()})})
    assert b"modules" not in plain.canonical() and plain.run_id != manifest.run_id
    assert with_modules(plain, [str(source.path)]).run_id == manifest.run_id


def test_package_is_named_by_all_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    write_module(tmp_path / "own_package", "__init__", "g")
    helper = tmp_path / "own_package" / "helper.py"
    helper.write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    (source,) = allow_modules(["own_package"])
    before = source.line
    assert own_registry((before,))["update"]["g"].__module__ == "own_package"
    helper.write_text("x = 2")
    assert source.line != before


def test_installed_package_with_an_entry_point_needs_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "own_h", "h")
    info = tmp_path / "own_h-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-h\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nmine = own_h\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = ModuleSource("own_h", tmp_path / "own_h.py").line
    assert build_method(manifest_with(line, "h")).update.kind == "h"


@pytest.mark.slow
def test_simulator_compares_the_example_with_a_variant(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.format(module="own_method", kind="sgd"))
    allow_modules([str(EXAMPLE)])
    recipes = ("averaging:inner_steps=2", "averaging:codec.kind=ternary,threshold=0.5,inner_steps=2")
    simulate(SimulationOptions(recipes, peers=2, steps=4, seeds=1, run=run, json=True))
    figures = json.loads(capsys.readouterr().out)["recipes"]
    assert figures[recipes[0]]["rounds"] == figures[recipes[1]]["rounds"] == 2
    assert figures[recipes[1]]["bits_per_parameter_sync"] == pytest.approx(2, rel=0.1)
    assert figures[recipes[0]]["bits_per_parameter_sync"] > 8


@pytest.mark.parametrize(
    ("text", "recipe", "tables"),
    [
        ("diloco", "diloco", {}),
        ("frugal:inner_steps=30,codec.k=32", "frugal", {"schedule": {"inner_steps": 30}, "codec": {"k": 32}}),
        ("averaging:codec.kind=int4,block=64", "averaging", {"codec": {"kind": "int4", "block": 64}}),
        (
            "diloco:schedule.inner_steps=[{ value = 1, rounds = 5 }, 9],momentum=0.8",
            "diloco",
            {"schedule": {"inner_steps": [{"value": 1, "rounds": 5}, 9]}, "update": {"momentum": 0.8}},
        ),
    ],
)
def test_variant_names_its_options(text: str, recipe: str, tables: object) -> None:
    variant = read_variant(text, REGISTRY)
    assert (variant.recipe, variant.tables) == (recipe, tables)
    variant.compose(REGISTRY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("frugal:", "write it like frugal:inner_steps=30"),
        ("frugal:k", "write it like"),
        ("frugal:inner_step=3", "did you mean 'inner_steps'"),
        ("dilco:inner_steps=3", "did you mean 'diloco'"),
        ("local-adam:codec.kind=int4,q=3", "has an option 'q'"),
        ("frugal:codec.k={ start = 3", "not a TOML value"),
        ("streaming-diloco:alpha=[1", "not a TOML value"),
        ("frugal:codec.kind=nix", "is not known"),
    ],
)
def test_wrong_variant_is_one_line(text: str, words: str) -> None:
    with pytest.raises(MurmurError, match=words) as fault:
        read_variant(text, REGISTRY).compose(REGISTRY)
    assert "\n" not in str(fault.value) and isinstance(fault.value, UsageError)
