"""`murmur rollback`, and the checkpoint that is kept before another chain replaces ours."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.commands.rollback import roll_back
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, load_newest, save
from node.daemon.checkpoints.checkpoint_folders import keep_newest, list_checkpoints, release_kept
from node.run_dir import RunDir
from protocol.blobs.blob import Blob
from protocol.conduct import excludes
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import Contribution
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import AlreadyRunningError, MissingFileError, UsageError
from protocol.identity import Identity
from tests.node.small_run import MANIFEST, NUMEL, RUN_ID, SHAPES, TOML, contribution_of, stated


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
    assert saved is not None and saved.round == 8 and len(list((node / "rolled-back").glob("*round-*"))) == 2


def statement(folder: Path, tokens: int) -> SignedMessage[Contribution]:
    """Return a contribution to the round after the rollback, signed by the key of a folder."""
    head = ChainHead(8, b"\x08" * 32, 800)
    body = replace(contribution_of(head, (Blob.of(b"x"),)), tokens=tokens)
    return stated(Identity.load_or_create(folder / "key"), body)


def test_rolled_back_node_signs_no_place_for_the_second_time(node: Path) -> None:
    (node / "vow.json").write_text("{}")
    write(node, 9)
    before = statement(node, 100)
    old_key = (node / "key").read_bytes()
    lines = roll_back(node, 8)
    assert "with a new key" in lines[0] and not (node / "vow.json").exists()
    after = statement(node, 50)
    assert after.sender != before.sender and not excludes(before, after)
    assert (node / "rolled-back" / "key").read_bytes() == old_key
    (node / "key").write_bytes(old_key)
    assert excludes(before, statement(node, 50)), "the control: the old key would be proven guilty"


def test_second_rollback_keeps_both_old_keys_and_the_newest_round_needs_no_new_one(node: Path) -> None:
    first = statement(node, 1).sender
    assert "nothing was changed" in roll_back(node, 8)[0] and statement(node, 1).sender == first
    roll_back(node, 7)
    second = statement(node, 1).sender
    write(node, 9)
    roll_back(node, 7)
    kept = {Identity.load_or_create(path).peer_id for path in (node / "rolled-back").glob("key*")}
    assert kept == {first, second} and statement(node, 1).sender not in kept


@pytest.mark.parametrize(("admission", "word"), [("tickets", "one for the new key"), ("list", "begin a new run")])
def test_rollback_says_which_right_the_new_key_lacks(node: Path, admission: str, word: str) -> None:
    organiser = Identity.load_or_create(node / "key").peer_id
    keys = f'keys = ["{organiser}"]' if admission == "list" else ""
    text = TOML.format(target="", min_peers=1).replace("[model]", f'organiser_key = "{organiser}"\n[model]')
    (node / "run.toml").write_text(text + f'[admission]\nmode = "{admission}"\n{keys}\n')
    lines = roll_back(node, 7)
    assert word in lines[1] and "the old key is the organiser's" in lines[2]


def test_rollback_of_a_running_node_or_an_unknown_round_changes_nothing(node: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="those of 7, 8"):
        roll_back(node, 9)
    with RunDir(node).lock(MANIFEST), pytest.raises(AlreadyRunningError):
        roll_back(node, 7)
    assert rounds(node) == [7, 8]
    with pytest.raises(MissingFileError):
        roll_back(tmp_path / "nowhere", None)
