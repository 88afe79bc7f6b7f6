"""A model of which a run knows names and shapes only: from the organiser's file to an export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import murmuration
from murmuration.own_model import OwnModel
from node.commands.plan.command import plan
from node.commands.up.up import UpOptions, resolve_options
from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.dashboard.command import HostOptions, host
from node.dashboard.evaluations import EvaluationPlan
from node.data.check import check_text
from node.data.tokenizer import ByteTokenizer
from node.from_manifest import build_own_loop_program
from node.model import build_model, initial_weights, shapes_of
from node.model.export import write_export
from node.model.weight_files import start_weights
from node.own_loops import join_line, needs_own_loop, require_our_loop
from node.run_file import load_run_file
from node.simulation.command import SimulationOptions, build_config
from protocol.errors import (
    CheckpointError,
    DataError,
    ManifestError,
    MissingFileError,
    StorageError,
    UsageError,
)
from protocol.manifest.model import format_tensor, parse_tensor
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.signing import open_signed_manifest, sign_manifest
from tests.node.small_run import MANIFEST, PEERS

torch.set_num_threads(1)
RUN = """
[run]
name = "patterns"
seed = 3
[model]
kind = "custom"
{model}
[data]
source = "own"
[train]
batch_tokens = 33
learning_rate = 0.1
[method]
recipe = "{recipe}"
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3))


def opened(folder: Path, *model: str, recipe: str = "diloco") -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RUN.format(model="\n".join(model), recipe=recipe))
    return load_run_file(folder / "run.toml").manifest


def described(folder: Path, suffix: str = ".json") -> Manifest:
    murmuration.describe(Net(), folder / f"net{suffix}")
    return opened(folder, f'{"tensors" if suffix == ".json" else "from"} = "net{suffix}"')


def test_names_and_shapes_come_from_the_file_and_everybody_draws_the_same_values(tmp_path: Path) -> None:
    manifest = described(tmp_path)
    table = shapes_of(manifest)
    assert dict(table.entries) == {name: tuple(value.shape) for name, value in Net().named_parameters()}
    assert not {"width", "layers", "context"} & json.loads(manifest.canonical())["model"].keys()
    flat = initial_weights(manifest.model, 3)
    views = table.views(flat)
    assert views["scale"] == 1 and bool((views["body.1.weight"] == 1).all()) and not views["body.1.bias"].any()
    for name in ("body.0.weight", "body.3.weight"):  # drawn as wide as torch's own
        assert views[name].std() == pytest.approx(dict(Net().named_parameters())[name].std().item(), rel=0.5)
    model = Net()
    OwnModel(model, manifest).load_flat(flat)
    assert torch.equal(dict(model.named_parameters())["body.3.weight"], views["body.3.weight"])
    assert torch.equal(flat, initial_weights(manifest.model, 3))
    assert not torch.equal(flat, initial_weights(manifest.model, 4))


def test_the_manifest_of_others_needs_no_file(tmp_path: Path) -> None:
    manifest = described(tmp_path)
    (tmp_path / "net.json").unlink()
    published = open_signed_manifest(sign_manifest(manifest, PEERS[0]), "here").manifest
    assert published == manifest and published.run_id == manifest.run_id
    assert parse_manifest(manifest.to_toml().encode(), "again").run_id == manifest.run_id
    line = manifest.model.tensors[0]
    other = manifest.model.model_copy(update={"tensors": (line.replace("ones", "zeros"), *manifest.model.tensors[1:])})
    assert manifest.model_copy(update={"model": other}).run_id != manifest.run_id


@pytest.mark.parametrize("recipe", ["diloco", "frugal", "sparseloco", "noloco", "streaming-diloco"])
def test_methods_take_shapes_of_any_number_of_dimensions(tmp_path: Path, recipe: str) -> None:
    murmuration.describe(Net(), tmp_path / "net.json")
    manifest = opened(tmp_path, 'tensors = "net.json"', recipe=recipe)
    assert build_own_loop_program(manifest).numel == sum(value.numel() for value in Net().parameters())


def test_weights_of_the_organiser_belong_to_the_run(tmp_path: Path) -> None:
    manifest = described(tmp_path, ".safetensors")
    weights = start_weights(manifest, tmp_path)
    assert weights is not None
    named = shapes_of(manifest).views(weights)
    saved = load_file(tmp_path / "net.safetensors")
    assert named.keys() == saved.keys() and all(torch.equal(named[name], saved[name]) for name in saved)
    saved["scale"] += 1
    save_file(saved, tmp_path / "net.safetensors")
    with pytest.raises(CheckpointError, match="other weights than this run began with"):
        start_weights(manifest, tmp_path)
    assert load_run_file(tmp_path / "run.toml").manifest.run_id != manifest.run_id
    assert start_weights(manifest.published(), tmp_path) is None, "peers must send them"


def test_export_has_the_names_and_starts_another_run(tmp_path: Path) -> None:
    manifest = described(tmp_path)
    flat = initial_weights(manifest.model, 3) + 1
    write_export(TrainedWeights(manifest, 7, flat), ByteTokenizer(), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.safetensors"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\n# patterns\n" in card and "library_name" not in card, "no library reads a model of its own kind"
    model = Net()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert model.scale.item() == 2
    second = opened(tmp_path, 'from = "out"')
    again = start_weights(second, tmp_path)
    assert again is not None
    assert torch.equal(shapes_of(second).views(again)["scale"], torch.tensor(2.0))


def test_each_difference_of_the_loops_model_is_named(tmp_path: Path) -> None:
    manifest = described(tmp_path)
    other = Net()
    other.body[3] = nn.Linear(16, 5)
    other.extra = nn.Parameter(torch.ones(2))
    del other.scale
    words = r"scale is missing; extra is not in the run; body\.3\.weight has shape \(5, 16\) instead of \(3, 16\); bo"
    with pytest.raises(UsageError, match=words):
        OwnModel(other, manifest)


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2, 3], "first": "normal 0.1"} | changes}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", r"net\.json is not a JSON object .*; write it by murmuration\.describe$"),
        ("[" * 100_000, r"is not a JSON object"),
        ({}, r"it names no tensor"),
        ({"w": 3}, r"w has no shape"),
        (entry(dtype="BF16"), r"w has the type BF16; parameters are F32"),
        (entry(shape=[2, "3"]), r"w has a shape or first values of the wrong type"),
        (
            entry(shape=[2, 0]),
            r"'w 2x0 normal 0\.1' is not a tensor; write NAME SHAPE and zeros, ones, constant VALUE or",
        ),
        (entry(shape=[2] * 9), r"is not a tensor"),
        (entry(first="uniform 1"), r"is not a tensor"),
        (entry(first=""), r"model.*tensors.* must have first values: append zeros, ones or normal 0.02 to 'w 2x3'"),
        (entry(shape=[2**20, 2**21]), r"have more than \d+ elements; use a smaller model"),
        ({"a b": entry()["w"]}, r"is not a tensor"),
        ({f"w{number}": {"dtype": "I8", "shape": [1]} for number in range(9)}, r"w0 has the type .*; and 4 more$"),
        ({f"w{number}": {"shape": [1], "first": "ones"} for number in range(1027)}, r"must have at most 1026 entries"),
    ],
)
def test_bad_file_is_one_line(tmp_path: Path, content: Any, words: str) -> None:
    (tmp_path / "net.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ManifestError, match=words) as caught:
        opened(tmp_path, 'tensors = "net.json"')
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], r"tensors must be given with kind = \"custom\""),
        (['tensors = ["w 2 ones", "w 3 ones"]'], r"model\.tensors \(line 7\): w is defined twice; remove one"),
        (['tensors = ["w 2 ones"]', "width = 64"], r"model\.width \(line 8\): belongs to other kinds"),
        (['tensors = ["w 2 ones"]', 'weights = ["00"]'], r"model\.weights"),
        (['tensors = "other.json"'], r"cannot read .*other\.json"),
    ],
)
def test_bad_manifest_is_one_line(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises((ManifestError, MissingFileError), match=words):
        opened(tmp_path, *lines)


def test_tensors_belong_to_custom_models_and_own_data_to_them(tmp_path: Path) -> None:
    text = RUN.format(model='tensors = ["w 2 ones"]', recipe="diloco")
    with pytest.raises(ManifestError, match=r'model\.tensors \(line 11\): must be given with kind = "custom"'):
        parse_manifest(text.replace('kind = "custom"', SIZES).encode(), "run.toml")
    with pytest.raises(ManifestError, match=r'data\.source \(line 9\): must be "own" with model\.kind = "custom"'):
        parse_manifest(text.replace('"own"', '"python-stdlib"').encode(), "run.toml")
    with pytest.raises(ManifestError, match=r"pipeline\.stages \(line 16\): must be 1 with model\.kind"):
        parse_manifest(f"{text}[pipeline]\nstages = 2".encode(), "run.toml")


SIZES = "width = 32\nlayers = 2\nheads = 4\nhidden = 48\ncontext = 11"


@pytest.mark.parametrize(
    "use",
    [
        lambda run, manifest: require_our_loop(manifest),  # `murmur join` and `murmur host --train`
        lambda run, manifest: resolve_options(UpOptions(run=run)),
        lambda run, manifest: build_config(SimulationOptions(("diloco",), run=run)),
        lambda run, manifest: plan(str(run), None, False, False),
        lambda run, manifest: host(HostOptions(run=run, http="127.0.0.1:0", evaluates=EvaluationPlan(1, ()))),
        lambda run, manifest: build_model(manifest.model),
        lambda run, manifest: murmuration.transformers_config(run),
    ],
)
def test_commands_that_would_compute_the_model_say_so(tmp_path: Path, use: Callable[[Path, Manifest], object]) -> None:
    manifest = described(tmp_path)
    with pytest.raises(UsageError, match="custom"):
        use(tmp_path / "run.toml", manifest)


def test_the_line_to_join_with_is_one_of_python(tmp_path: Path) -> None:
    url = "https://run.example.org/run.toml"
    custom = described(tmp_path)
    assert needs_own_loop(custom) and not needs_own_loop(MANIFEST)
    assert join_line(url, custom) == f'murmuration.join("{url}", model, optimizer)'
    assert join_line(url, MANIFEST) == join_line(url, None) == f"murmur join {url}"
    method = MANIFEST.method.model_copy(update={"modules": (f"own_task {64 * 'a'}",)})
    with_task = MANIFEST.model_copy(update={"method": method})
    assert join_line(url, with_task) == f"murmur join {url} --import own_task.py"


def test_a_run_without_text_says_how_to_join(tmp_path: Path) -> None:
    text = RUN.format(model="", recipe="diloco").replace('kind = "custom"', SIZES)
    manifest = parse_manifest(text.encode(), "run.toml")
    for use, kind in ((require_our_loop, UsageError), (lambda run: check_text(run, tmp_path), DataError)):
        with pytest.raises(kind, match=r"the run has no text .*; join by murmuration\.join"):
            use(manifest)


def test_describe_refuses_what_a_run_cannot_exchange(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"body\.0\.weight is torch\.bfloat16 instead of float32"):
        murmuration.describe(Net().bfloat16(), tmp_path / "net.json")
    with pytest.raises(UsageError, match=r"ends in neither \.json \(names\) nor \.safetensors \(weights\)"):
        murmuration.describe(Net(), tmp_path / "net.pt")
    murmuration.describe(Net(), tmp_path / "net.json")
    with pytest.raises(StorageError, match="File exists; name a new file"):
        murmuration.describe(Net(), tmp_path / "net.json")


@pytest.mark.parametrize(
    "line", ["w scalar zeros", "a.b.c 3x4 normal 0.5", "x-y 7", "w 2 normal 1e-3", "w 2 constant -0.25"]
)
def test_lines_are_read_as_they_were_written(line: str) -> None:
    tensor = parse_tensor(line)
    first = line.split(" ", 2)[2] if line.count(" ") > 1 else ""
    assert format_tensor(tensor.name, tensor.shape, first) == line


def test_constants_stay_constants(tmp_path: Path) -> None:
    """A network often begins with a slope, a scale or a temperature that is neither 0 nor 1."""
    model = nn.Sequential(nn.Linear(2, 3), nn.PReLU(3))
    model.register_parameter("gamma", nn.Parameter(torch.full((3,), 0.1)))
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.66)))
    murmuration.describe(model, tmp_path / "net.json")
    views = shapes_of(manifest := opened(tmp_path, 'tensors = "net.json"')).views(initial_weights(manifest.model, 3))
    for name in ("1.weight", "gamma", "logit_scale"):
        assert torch.equal(views[name], dict(model.named_parameters())[name]), name
    assert views["0.weight"].std() > 0
