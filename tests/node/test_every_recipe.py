"""Whatever a recipe's parts hold, one peer alone can begin a run with it, save what it has, and go on from there."""

from pathlib import Path

import pytest
import torch

from node.commands.up.up import UpOptions, adapt_manifest
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, load_newest, save
from node.daemon.state.outer_state import OuterState
from node.from_manifest import build_program
from node.model import shape_table
from node.model.memory_estimate import fit_microbatch
from node.trainer.ipc.shared_memory import SharedLayout
from optim.recipes import RECIPES
from protocol.manifest.reading import load_manifest, parse_manifest
from protocol.manifest.run import Manifest

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "configs" / "test.toml"
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def manifest_of(recipe: str) -> Manifest:
    """As `murmur up RUN.toml --recipe NAME` has it, for a model that can be cut into a few fragments."""
    given = load_manifest(CONFIG)
    deep = given.model_copy(update={"model": given.model.model_copy(update={"layers": 3})})
    return adapt_manifest(deep, CONFIG.parent, 3, UpOptions(recipe=recipe, rounds=2))


@each_recipe
def test_a_manifest_with_it_is_written_and_read_and_fits_this_machine(recipe: str) -> None:
    manifest = manifest_of(recipe)
    assert parse_manifest(manifest.to_toml().encode(), "written") == manifest and manifest.method.recipe == recipe
    assert fit_microbatch(manifest, None, "cpu") == manifest.train.microbatch


@each_recipe
def test_all_that_it_keeps_is_saved_and_comes_back(recipe: str, tmp_path: Path) -> None:
    manifest = manifest_of(recipe)
    program, shapes = build_program(manifest), shape_table(manifest.model)
    state = OuterState.initial(torch.randn(shapes.numel), program.method)
    checkpoint = Checkpoint(
        run_id=manifest.run_id,
        shapes=shapes.hash(),
        round=1,
        digest=bytes(32),
        chain=SavedChain({}, b""),
        anchor=state.anchor,
        outer={name: torch.randn(slot.numel()) for name, slot in state.slots.items()},
        inner={name: torch.randn(numel) for name, numel in SharedLayout.of(program).vectors},
        inner_meta={},
    )
    save(tmp_path, checkpoint, shapes, keep=1)
    loaded, skipped = load_newest(tmp_path, manifest.run_id, shapes)
    assert loaded is not None and not skipped
    for back, kept in ((loaded.outer, checkpoint.outer), (loaded.inner, checkpoint.inner)):
        assert back.keys() == kept.keys()
        assert all(torch.equal(back[name], kept[name]) for name in kept)
