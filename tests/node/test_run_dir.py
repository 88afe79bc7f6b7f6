"""A folder has one node and one run, and remembers no more than it can read."""

import json
import os
from pathlib import Path

import pytest

from node.run_dir import RunDir, is_locked, tokenizer_path, write_atomically
from protocol.errors import AlreadyRunningError, OtherRunError, StorageError
from protocol.manifest import Manifest, load_manifest
from tests.node.small_run import MANIFEST, manifest_of


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def claim_once(folder: RunDir, manifest: Manifest = MANIFEST) -> None:
    with folder.lock(manifest):
        pass


def test_the_first_claim_makes_the_folder_and_its_manifest(tmp_path: Path) -> None:
    with RunDir(tmp_path / "deep" / "run").lock(MANIFEST) as folder:
        assert load_manifest(folder.path / "run.toml").run_id == MANIFEST.run_id
        assert folder.path.stat().st_mode & 0o777 == 0o700
    claim_once(folder)


def test_two_nodes_or_two_runs_in_one_folder_are_refused_and_leave_nothing_open(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    before = descriptors()
    with first.lock(MANIFEST):
        while_held = descriptors()
        with pytest.raises(AlreadyRunningError, match="another node runs"):
            claim_once(second)
        assert descriptors() == while_held, "the refused one leaves its file open"
    with pytest.raises(OtherRunError, match="belongs to the run small"):
        claim_once(second, manifest_of("rounds = 5"))
    assert descriptors() == before, "the lock stays held"
    claim_once(first)


def test_what_fails_inside_is_not_the_folders_fault(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of its own"), RunDir(tmp_path).lock(MANIFEST):
        raise OSError("of its own")
    assert not is_locked(tmp_path)


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another --dir"):
        claim_once(RunDir(tmp_path / "file"))


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", RunDir(tmp_path / "node")
    run.mkdir()
    values = MANIFEST.model_dump(mode="json", exclude_none=True)
    values["data"]["tokenizer"] = "words/tokenizer.json"
    manifest = Manifest.model_validate_json(json.dumps(values))
    with folder.lock(manifest):
        folder.copy_tokenizer(manifest, run)
        assert tokenizer_path(folder.path, manifest) == folder.path / "words" / "tokenizer.json", (
            "there was none to keep"
        )
        (run / "words").mkdir()
        (run / "words" / "tokenizer.json").write_text("{}")
        folder.copy_tokenizer(manifest, run)
        assert tokenizer_path(folder.path, manifest).read_text() == "{}"


def test_the_port_of_the_last_start(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    assert folder.read_last_port() == 0
    folder.write_node_info("me", ("/ip4/1.2.3.4/udp/5/quic", "/ip4/1.2.3.4/tcp/4321/p2p/me"), 99)
    assert folder.read_last_port() == 4321
    values = json.loads((tmp_path / "node.json").read_text())
    assert (values["pid"], values["peer_id"], values["metrics_port"]) == (os.getpid(), "me", 99)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"addresses": []}', '{"addresses": [3]}', "\0\0\0"])
def test_what_cannot_be_read_is_not_remembered(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.json").write_text(text)
    assert RunDir(tmp_path).read_last_port() == 0


def test_a_last_word_is_gone_with_the_next_start(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    with folder.lock(MANIFEST):
        folder.write_final_status("{}")
    assert (tmp_path / "status.json").read_text() == "{}"
    claim_once(folder)
    assert not (tmp_path / "status.json").exists(), "a killed node left none: the one before it is not its own"


def test_whether_a_folder_is_held(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    assert not is_locked(tmp_path)
    with folder.lock(MANIFEST):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    claim_once(folder)


def test_a_write_that_fails_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device; free some"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]
