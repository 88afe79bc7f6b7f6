"""Checkpoints are restored exactly, damaged ones are skipped, and every error suggests a remedy."""

import json
import logging
import random
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from node.daemon.checkpoints import checkpoint as module
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, load_newest, save
from node.daemon.checkpoints.trained_weights import load_trained_weights
from node.model import ShapeTable, shape_table
from protocol.errors import CheckpointError, MissingFileError, OtherRunError, StorageError
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection, MethodSection, RunSection, TrainSection

MODEL = ModelSection(vocabulary=16, width=8, layers=1, heads=2, hidden=12, context=8)
SHAPES = shape_table(MODEL)
RUN_ID = "ab" * 32


def vector(seed: int) -> Tensor:
    return torch.randn(SHAPES.numel, generator=torch.Generator().manual_seed(seed))


def make_checkpoint(round_number: int, run_id: str = RUN_ID) -> Checkpoint:
    names = ("weights", "first_moment", "second_moment", "residual", "reference")
    inner = {name: vector(1000 * index + round_number) for index, name in enumerate(names, 1)}
    inner["outbox"] = torch.arange(37, dtype=torch.uint8) + round_number
    return Checkpoint(
        run_id=run_id,
        shapes=SHAPES.hash(),
        round=round_number,
        digest=bytes([round_number]) * 32,
        chain=SavedChain({"tokens": 2**40, "roster": ["a", "b"], "share": 0.1}, b"commits"),
        anchor=vector(round_number),
        outer={"momentum": vector(-round_number), "memory": torch.arange(9.0) + round_number},
        inner=inner,
        inner_meta={"step": 7 * round_number, "outstanding": None},
    )


def assert_equal(loaded: Checkpoint | None, expected: Checkpoint) -> None:
    assert loaded is not None
    assert torch.equal(loaded.anchor, expected.anchor)
    for actual, wanted in ((loaded.outer, expected.outer), (loaded.inner, expected.inner)):
        assert list(actual) == list(wanted)
        for name, tensor in actual.items():
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    for field in ("run_id", "shapes", "round", "digest", "chain", "inner_meta"):
        assert getattr(loaded, field) == getattr(expected, field), field


def test_saved_checkpoint_is_loaded_unchanged(tmp_path: Path) -> None:
    save(tmp_path / "new" / "folder", make_checkpoint(3), SHAPES, keep=2)
    loaded, skipped = load_newest(tmp_path / "new" / "folder", RUN_ID, SHAPES)
    assert_equal(loaded, make_checkpoint(3))
    assert skipped == []


def test_views_and_an_empty_outbox_are_restored(tmp_path: Path) -> None:
    """Vectors may be slices of shared memory, and the outbox may be empty."""
    saved, memory = make_checkpoint(1), torch.cat((vector(5), vector(6)))
    inner = {"weights": memory[SHAPES.numel :], "outbox": torch.empty(0, dtype=torch.uint8)}
    saved = replace(saved, inner=inner)
    save(tmp_path, saved, SHAPES, keep=1)
    loaded, _ = load_newest(tmp_path, RUN_ID, SHAPES)
    assert loaded is not None
    assert torch.equal(loaded.inner["weights"], vector(6)) and loaded.inner["outbox"].numel() == 0


def test_folder_without_checkpoints_loads_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "absent", RUN_ID, SHAPES) == (None, [])
    assert load_newest(tmp_path, RUN_ID, SHAPES) == (None, [])


def test_files_are_private_and_use_parameter_names(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", make_checkpoint(1), SHAPES, keep=2)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "checkpoints").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert sorted(file.name for file in path.iterdir()) == [
        "anchor.safetensors",
        "chain.bin",
        "inner.safetensors",
        "manifest.json",
        "outer.memory.safetensors",
        "outer.momentum.safetensors",
    ]
    anchor = safetensors.torch.load_file(path / "anchor.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in anchor.items()} == dict(SHAPES.entries)
    assert json.loads((path / "manifest.json").read_text())["body"]["round"] == 1


def test_save_prunes_old_checkpoints(tmp_path: Path) -> None:
    for round_number in range(1, 5):
        save(tmp_path, make_checkpoint(round_number), SHAPES, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000003.round-3", "0000000004.round-4"]


def test_newest_is_the_last_save_and_not_the_highest_round(tmp_path: Path) -> None:
    """A peer that switched chains may be at a lower round, and a round may be saved twice."""
    for round_number in (11, 9, 9):
        path = save(tmp_path, make_checkpoint(round_number), SHAPES, keep=3)
    assert path.name == "0000000003.round-9"
    loaded, _ = load_newest(tmp_path, RUN_ID, SHAPES)
    assert_equal(loaded, make_checkpoint(9))


def test_next_save_removes_the_leftovers_of_a_killed_one(tmp_path: Path) -> None:
    first = save(tmp_path, make_checkpoint(1), SHAPES, keep=2)
    shutil.copytree(first, tmp_path / ".0000000002.round-2")
    loaded, skipped = load_newest(tmp_path, RUN_ID, SHAPES)
    assert_equal(loaded, make_checkpoint(1))
    assert skipped == []
    save(tmp_path, make_checkpoint(2), SHAPES, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000001.round-1", "0000000002.round-2"]


@pytest.mark.parametrize("seed", [20])
def test_every_flipped_bit_is_detected(tmp_path: Path, seed: int) -> None:
    """Flip 1000 random bits one at a time: each file is named, and the older checkpoint loaded."""
    rng = random.Random(seed)
    save(tmp_path, make_checkpoint(1), SHAPES, keep=2)
    newest = save(tmp_path, make_checkpoint(2), SHAPES, keep=2)
    files = sorted(newest.iterdir())
    for _ in range(1000):
        file = rng.choice(files)
        position, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, position, bit)
        loaded, skipped = load_newest(tmp_path, RUN_ID, SHAPES)
        assert loaded is not None and loaded.round == 1, (seed, file.name, position, bit)
        assert len(skipped) == 1 and str(newest) in skipped[0] and file.name in skipped[0]
        flip(file, position, bit)
    assert_equal(load_newest(tmp_path, RUN_ID, SHAPES)[0], make_checkpoint(2))


def test_control_safetensors_alone_does_not_detect_flipped_bits(tmp_path: Path) -> None:
    newest, rng = save(tmp_path, make_checkpoint(1), SHAPES, keep=2), random.Random(0)
    file = newest / "anchor.safetensors"
    start, unseen = 8 + int.from_bytes(file.read_bytes()[:8], "little"), 0
    for _ in range(50):
        position = rng.randrange(start, file.stat().st_size)
        flip(file, position, 0)
        unseen += len(safetensors.torch.load_file(file)) == len(SHAPES.names)
        flip(file, position, 0)
    assert unseen == 50


def flip(file: Path, position: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize("name", ["anchor.safetensors", "chain.bin", "inner.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "longer"])
def test_damaged_checkpoint_is_named_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    save(tmp_path, make_checkpoint(1), SHAPES, keep=2)
    file = save(tmp_path, make_checkpoint(2), SHAPES, keep=2) / name
    whole = file.read_bytes()
    changed = {"empty": b"", "half": whole[: len(whole) // 2], "longer": whole + b"\0"}
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        loaded, skipped = load_newest(tmp_path, RUN_ID, SHAPES)
    assert_equal(loaded, make_checkpoint(1))
    assert len(skipped) == 1 and name in skipped[0] and not caplog.records, "the caller logs it, once"


@pytest.mark.parametrize("text", [b"[1]", b"{}", b'{"body": 3, "sha256": ""}', b"[" * 100_000, b"\xff"])
def test_checkpoint_with_an_unreadable_manifest_is_skipped(tmp_path: Path, text: bytes) -> None:
    (save(tmp_path, make_checkpoint(1), SHAPES, keep=2) / "manifest.json").write_bytes(text)
    loaded, skipped = load_newest(tmp_path, RUN_ID, SHAPES)
    assert loaded is None and len(skipped) == 1


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_checkpoint(1, run_id="cd" * 32), SHAPES, keep=2)
    with pytest.raises(OtherRunError, match="belongs to run cdcdcdcdcdcd, not abababababab; choose another folder"):
        load_newest(tmp_path, RUN_ID, SHAPES)


def test_checkpoint_with_other_shapes_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_checkpoint(1), SHAPES, keep=2)
    with pytest.raises(CheckpointError, match="other shapes; choose another folder or remove it"):
        load_newest(tmp_path, RUN_ID, shape_table(MODEL.model_copy(update={"hidden": 16})))


def test_later_format_is_refused_rather_than_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + 1)
    save(tmp_path, make_checkpoint(1), SHAPES, keep=2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="update murmuration"):
        load_newest(tmp_path, RUN_ID, SHAPES)


def test_save_with_the_wrong_shape_table_raises_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another shape table"):
        save(tmp_path, make_checkpoint(1), ShapeTable((("a", (SHAPES.numel,)),)), keep=2)


def test_folder_that_cannot_be_created_raises_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="free some space or move the folder"):
        save(tmp_path / "file" / "checkpoints", make_checkpoint(1), SHAPES, keep=2)


def manifest() -> Manifest:
    return Manifest(
        run=RunSection(name="test"),
        model=MODEL,
        data=DataSection(source="python-stdlib"),
        train=TrainSection(batch_tokens=8, learning_rate=0.1),
        method=MethodSection(recipe="diloco"),
    )


def test_load_trained_weights_reads_only_the_anchor(tmp_path: Path) -> None:
    run = manifest()
    (tmp_path / "run.toml").write_text(run.to_toml())
    with pytest.raises(CheckpointError, match="none yet; let the node finish a round first"):
        load_trained_weights(tmp_path)
    path = save(tmp_path / "checkpoints", make_checkpoint(4, run.run_id), SHAPES, keep=2)
    (path / "inner.safetensors").unlink()  # the peer's own vectors are not read
    trained = load_trained_weights(tmp_path)
    assert trained.round == 4 and trained.manifest == run and torch.equal(trained.anchor, vector(4))
    (path / "anchor.safetensors").unlink()
    with pytest.raises(CheckpointError, match="all are damaged"):
        load_trained_weights(tmp_path)


def test_load_trained_weights_logs_skipped_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = manifest()
    (tmp_path / "run.toml").write_text(run.to_toml())
    for number in (4, 5):
        path = save(tmp_path / "checkpoints", make_checkpoint(number, run.run_id), SHAPES, keep=2)
    (path / "anchor.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        assert load_trained_weights(tmp_path).round == 4
    assert [str(path) in record.message for record in caplog.records] == [True]


def test_load_trained_weights_without_a_run_raises(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        load_trained_weights(tmp_path)
