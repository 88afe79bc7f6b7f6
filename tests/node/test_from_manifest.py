"""From a manifest to its method's program, its rounds and its learning rate."""

import math
from dataclasses import asdict

import pytest

from node.from_manifest import (
    build_method,
    build_node_program,
    build_program,
    in_memory_mode,
    learning_rate_scale,
    require_program,
    round_settings_by_number,
)
from node.loop.steering import unsteered
from node.model import all_cuts, shape_table
from optim.recipes import RECIPES
from optim.topologies import TOPOLOGIES as OPTIONS
from protocol.consensus.topology import TOPOLOGIES, Butterfly, Groups, make_topology
from protocol.errors import ManifestError, UsageError
from protocol.manifest.reading import ManifestText, parse_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import TrainSection

TOML = """
[run]
name = "small"
[model]
vocabulary = 16
width = 8
layers = 4
heads = 2
hidden = 16
context = 8
[data]
source = "text"
path = "*.txt"
[train]
batch_tokens = 8
learning_rate = 1e-2
[round]
parts = 3
[method]
recipe = "{recipe}"
{tables}
"""


def manifest_of(recipe: str = "diloco", tables: str = "") -> Manifest:
    return parse_manifest(TOML.format(recipe=recipe, tables=tables).encode(), "test")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_row_fits_a_model(recipe: str) -> None:
    manifest = manifest_of(recipe)
    program = build_program(manifest)
    assert program.method == build_method(manifest) and program.method.name == recipe
    assert program.layout == shape_table(manifest.model).layout
    assert 0 < program.max_part_bytes <= program.max_contribution_bytes


def test_another_method_may_be_laid_over_the_model() -> None:
    other = build_method(manifest_of("sparseloco"))
    assert build_program(manifest_of("diloco"), other).method is other


@pytest.mark.parametrize(
    ("recipe", "tables", "reason"),
    [
        ("dilocco", "", "method: no recipe is called 'dilocco'; did you mean 'diloco'"),
        ("diloco", "[method.codec]\nblock = 8", "method: codec.block = 8"),
        ("diloco", "[method.schedule]\nfragments = 7", "method: schedule.fragments = 7: the model has 6 blocks"),
        ("local-adam", "[method.schedule]\nfragments = 2", "method: signal 'inner-state' is sent whole"),
        ("data-parallel", '[method.inner]\nkind = "adamw"', "method: .*inner 'adamw' does not keep"),
        ("diloco", "[method.update]\nmomentum = { start = 0, end = 2, rounds = 9 }", "method: update.momentum = 2"),
        (
            "diloco",
            '[method.update]\nmomentum = "0 -> 2 over 9"',
            "method: update.momentum = '0 -> 2 over 9': a value that changes over the rounds is a table; write { start",
        ),
    ],
)
def test_a_method_that_cannot_be_is_a_fault_of_the_manifest_in_one_line(recipe: str, tables: str, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason) as caught:
        build_program(manifest_of(recipe, tables))
    assert "\n" not in str(caught.value)


def test_each_round_has_its_own_settings() -> None:
    tables = (
        '[method.schedule]\nquorum = [{ value = 1.0, rounds = 2 }, 0.5]\nfragments = 2\npattern = "contiguous"\n'
        '[method.codec]\nkind = "topk"\nchunk = 512'
    )
    manifest = manifest_of(tables=tables)
    program = build_program(manifest)
    settings = round_settings_by_number(unsteered(manifest), program)
    assert [settings(number).roster_quorum for number in (0, 1, 2, 9)] == [1.0, 1.0, 0.5, 0.5]
    for number in range(4):
        found = settings(number)
        assert found.parts == len(program.plan(number).part_spans) and isinstance(found.topology, Butterfly)
        assert (found.run_id, found.grace) == (manifest.run_id, manifest.round.grace)
    assert program.max_parts == max(settings(number).parts for number in range(2))


def test_every_topology_of_a_method_has_an_exchange_with_the_same_options() -> None:
    assert OPTIONS.keys() == TOPOLOGIES.keys()
    for kind, options in OPTIONS.items():
        given = options()
        topology = make_topology(kind, "run", 1, **asdict(given))
        assert topology.kind == given.kind == kind
        assert given.reduces_parts == (topology.reduced_part_count > 0)


def test_groups_say_how_large_and_by_which_pattern() -> None:
    manifest = manifest_of("noloco", '[method.topology]\nsize = 4\npattern = "random"')
    found = round_settings_by_number(unsteered(manifest), build_program(manifest))(3)
    assert found.topology == Groups(manifest.run_id, 1, size=4, pattern="random")


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1 / 5),
        (3, 4 / 5 * (0.1 + 0.9 * (1 + math.cos(math.pi * 3 / 100)) / 2)),
        (50, 0.55),
        (100, 0.1),
        (5000, 0.1),
    ],
)
def test_the_learning_rate_warms_up_and_decays(step: int, expected: float) -> None:
    train = TrainSection(batch_tokens=24, learning_rate=1e-2, warmup_steps=4, decay_steps=100, final_share=0.1)
    assert learning_rate_scale(train, step) == pytest.approx(expected)


def test_without_warm_up_and_decay_it_is_constant() -> None:
    assert {
        learning_rate_scale(TrainSection(batch_tokens=24, learning_rate=1e-2), step) for step in (0, 1, 10_000)
    } == {1.0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('recipe = "diloco"', 'recipe = "dilocco"', "run.toml: method.recipe (line 23): no recipe is called 'dilocco'"),
        ("block = 256", "block = 0", "run.toml: method.codec.block (line 26): codec.block = 0: must be at least"),
        ("block = 256", "blokc = 9", "run.toml: method.codec.blokc (line 26): codec 'int8' has no option 'blokc'"),
        (
            "[method.codec]\nblock",
            "[method.schedule]\nfragments",
            "run.toml: method.schedule (line 25): schedule: fragments",
        ),
        ("block = 256", 'kind = "topk"\nchunk = 7', "run.toml: method.codec.chunk (line 27): "),
        ("[model]", '[model]\nkind = "bert"', "run.toml: model.kind (line 6): no kind of model is called 'bert'"),
        (
            "[run]",
            "[pipeline]\nstages = 2\n[run]",
            "run.toml: model (line 7): the embedding is in the first stage",
        ),
        ("[run]", "[pipeline]\nstages = 5\n[run]", "run.toml: pipeline.stages (line 3): 5 stages need as many layers"),
    ],
)
def test_error_of_method_or_model_names_the_file_and_the_line(old: str, new: str, message: str) -> None:
    text = LOCATED.replace(old, new, 1)
    assert text != LOCATED
    with pytest.raises(ManifestError) as caught:
        require_program(parse_manifest(text.encode(), "run.toml"), ManifestText("run.toml", text))
    assert str(caught.value).startswith(message), caught.value
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("recipe", "table", "message"),
    [
        ("noloco", "", "pipeline.stages: peers of topology 'groups' have anchors of their own"),
        (
            "diloco",
            '[method.inner]\nkind = "gpa"',
            "method.inner: 'gpa' takes its gradient at other weights than a stage",
        ),
        ("distro", "", "method.inner: 'gathering-ahead' takes its gradient at other weights than a stage"),
        ("diloco", "[audits]\nshare = 0.1", "audits.share: a stage's contributions hold microbatches of other peers"),
        ("diloco", "[method.schedule]\nfragments = 2", "schedule.fragments = 2: the model has 1 block"),
    ],
)
def test_pipelines_exclude_groups_audits_lookahead_and_more_fragments_than_blocks(
    recipe: str, table: str, message: str
) -> None:
    text = TOML.format(recipe=recipe, tables=f"[pipeline]\nstages = 4\nmicrobatch = 1\n{table}")
    manifest = parse_manifest(text.replace("layers = 4", "layers = 4\ntied = false").encode(), "test")
    with pytest.raises(ManifestError) as caught:
        require_program(manifest, ManifestText("test", ""))
    assert message in str(caught.value)


def test_program_of_a_stage_has_the_layout_of_its_cut() -> None:
    text = TOML.format(recipe="diloco", tables="[pipeline]\nstages = 4\nmicrobatch = 1")
    manifest = parse_manifest(text.replace("layers = 4", "layers = 4\ntied = false").encode(), "test")
    programs = [build_program(manifest, cut=cut) for cut in all_cuts(4)]
    assert sum(program.numel for program in programs) == shape_table(manifest.model).numel


LOCATED = """
[run]
name = "demo"

[model]
width = 128
layers = 4
heads = 4
hidden = 344
context = 128

[data]
source = "python-stdlib"

[train]
batch_tokens = 2048
learning_rate = 3e-3

# how the peers' updates become one model
# a comment, and another

[method]
recipe = "diloco"

[method.codec]
block = 256
"""


def test_little_memory_is_an_option_of_one_node_or_of_the_run() -> None:
    """Controls: the mode of a node wins, and a run that excludes it says so in one line."""
    manifest = manifest_of("frugal")
    small = in_memory_mode(manifest, "small")
    assert manifest.run_id == in_memory_mode(manifest, "normal").run_id != small.run_id
    for program in (build_node_program(manifest, "small"), build_node_program(small, None)):
        method = program.method
        assert method.has_small_memory and method.inner.kind == "adamw-8bit"
    assert not build_node_program(small, "normal").method.has_small_memory
    with pytest.raises(UsageError, match="^--memory-mode small: recipe local-adam exchanges 'first_moment'"):
        build_node_program(manifest_of("local-adam"), "small")
    with pytest.raises(ManifestError, match='^train.memory = "small": recipe local-adam exchanges'):
        build_program(in_memory_mode(manifest_of("local-adam"), "small"))
    audited = manifest.model_copy(update={"audits": manifest.audits.model_copy(update={"share": 0.5})})
    with pytest.raises(UsageError, match="peers repeat steps of one another"):
        build_node_program(audited, "small")
