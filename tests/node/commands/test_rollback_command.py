"""`murmur rollback`, and the checkpoint that is kept before another chain replaces ours."""

from pathlib import Path

import pytest
import torch

from node.commands.rollback import roll_back
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, load_newest, save
from node.daemon.checkpoints.checkpoint_folders import keep_newest, list_checkpoints, release_kept
from node.run_dir import RunDir
from protocol.errors import AlreadyRunningError, MissingFileError, UsageError
from tests.node.small_run import MANIFEST, NUMEL, RUN_ID, SHAPES


def write(folder: Path, number: int) -> None:
    taken = Checkpoint(
        RUN_ID, SHAPES.hash(), number, bytes(32), SavedChain({}, b""), torch.full((NUMEL,), float(number)), {}, {}, {}
    )
    save(folder / "checkpoints", taken, SHAPES, keep=2)


def rounds(folder: Path) -> list[int]:
    return [entry.round for entry in list_checkpoints(folder / "checkpoints")]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(MANIFEST.to_toml())
    for number in (7, 8):
        write(tmp_path, number)
    return tmp_path


def test_checkpoint_before_a_jump_outlives_the_rounds_after_it(node: Path) -> None:
    """Control: without the mark, two rounds replace all that was there before."""
    keep_newest(node / "checkpoints")
    for number in (1000, 1001, 1002):
        write(node, number)
    assert rounds(node) == [8, 1001, 1002]
    keep_newest(node / "checkpoints")
    write(node, 1003)
    assert rounds(node) == [8, 1002, 1003], "a second jump does not replace the one that is kept"
    release_kept(node / "checkpoints")
    write(node, 1004)
    assert rounds(node) == [1003, 1004]


def test_rollback_lists_and_returns_to_a_kept_checkpoint(node: Path) -> None:
    keep_newest(node / "checkpoints")
    for number in (1000, 1001, 1002):
        write(node, number)
    listed = roll_back(node, None)
    assert [line.split(":")[0] for line in listed[:-1]] == ["round 8", "round 1001", "round 1002"]
    assert "kept because another chain replaced it" in listed[0]
    assert "goes on from round 8" in roll_back(node, 8)[0]
    saved, _ = load_newest(node / "checkpoints", RUN_ID, SHAPES)
    assert saved is not None and saved.round == 8 and len(list((node / "rolled-back").iterdir())) == 2


def test_rollback_of_a_running_node_or_an_unknown_round_changes_nothing(node: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="those of 7, 8"):
        roll_back(node, 9)
    with RunDir(node).lock(MANIFEST), pytest.raises(AlreadyRunningError):
        roll_back(node, 7)
    assert rounds(node) == [7, 8]
    with pytest.raises(MissingFileError):
        roll_back(tmp_path / "nowhere", None)
