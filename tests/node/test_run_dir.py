"""A folder has one node and one run, and ignores files that it cannot read."""

import json
import os
from pathlib import Path

import pytest

from node.run_dir import RunDir, is_locked, tokenizer_path, write_atomically
from protocol.errors import AlreadyRunningError, DataError, OtherRunError, StorageError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from tests.node.small_run import MANIFEST, manifest_of

PEER = "12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def lock_once(folder: RunDir, manifest: Manifest = MANIFEST) -> None:
    with folder.lock(manifest):
        pass


def test_first_lock_creates_the_folder_and_its_manifest(tmp_path: Path) -> None:
    with RunDir(tmp_path / "deep" / "run").lock(MANIFEST) as folder:
        assert load_manifest(folder.path / "run.toml").run_id == MANIFEST.run_id
        assert folder.path.stat().st_mode & 0o777 == 0o700
    lock_once(folder)


def test_second_node_or_run_in_a_folder_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    before = count_descriptors()
    with first.lock(MANIFEST):
        while_locked = count_descriptors()
        with pytest.raises(AlreadyRunningError, match="another node runs"):
            lock_once(second)
        assert count_descriptors() == while_locked, "the refused node must close its file"
    with pytest.raises(OtherRunError, match=r"belongs to the run small .*different: target.rounds none -> 5; continue"):
        lock_once(second, manifest_of("rounds = 5"))
    assert count_descriptors() == before, "the lock must be released"
    lock_once(first)


def test_error_inside_the_lock_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of its own"), RunDir(tmp_path).lock(MANIFEST):
        raise OSError("of its own")
    assert not is_locked(tmp_path)


def test_path_that_is_not_a_folder_raises_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another --dir"):
        lock_once(RunDir(tmp_path / "file"))


def test_tokenizer_is_copied_to_the_folder(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", RunDir(tmp_path / "node")
    run.mkdir()
    values = MANIFEST.model_dump(mode="json", exclude_none=True)
    values["data"]["tokenizer"] = "words/tokenizer.json"
    manifest = Manifest.model_validate_json(json.dumps(values))
    with folder.lock(manifest):
        folder.copy_tokenizer(manifest, run)
        assert tokenizer_path(folder.path, manifest) == folder.path / "words" / "tokenizer.json", (
            "without a file to copy, the original path"
        )
        (run / "words").mkdir()
        (run / "words" / "tokenizer.json").write_text("{}")
        folder.copy_tokenizer(manifest, run)
        assert tokenizer_path(folder.path, manifest).read_text() == "{}"


def test_tokenizer_of_a_node_that_has_trained_does_not_change(tmp_path: Path) -> None:
    """The same ids would be other text. Before the first checkpoint a wrong file may still be replaced."""
    values = MANIFEST.model_dump(mode="json", exclude_none=True)
    values["data"]["tokenizer"] = "words.json"
    manifest, source = Manifest.model_validate_json(json.dumps(values)), tmp_path / "words.json"
    with RunDir(tmp_path / "node").lock(manifest) as folder:
        for text in ("{}", "{ }"):
            source.write_text(text)
            folder.copy_tokenizer(manifest, tmp_path)
        (folder.checkpoints / "0000000001.round-1").mkdir(parents=True)
        folder.copy_tokenizer(manifest, tmp_path)
        source.write_text("{}")
        with pytest.raises(DataError, match="is not the tokenizer that this node has trained with; restore"):
            folder.copy_tokenizer(manifest, tmp_path)
        assert tokenizer_path(folder.path, manifest).read_text() == "{ }"


def test_last_port_is_read_from_the_node_info(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    assert folder.read_last_port() == 0
    folder.write_node_info("me", ("/ip4/1.2.3.4/udp/5/quic", "/ip4/1.2.3.4/tcp/4321/p2p/me"), 99)
    assert folder.read_last_port() == 4321
    values = json.loads((tmp_path / "node.json").read_text())
    assert (values["pid"], values["peer_id"], values["metrics_port"]) == (os.getpid(), "me", 99)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"addresses": []}', '{"addresses": [3]}', "\0\0\0"])
def test_damaged_node_info_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.json").write_text(text)
    assert RunDir(tmp_path).read_last_port() == 0


def test_next_start_removes_the_final_status(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    with folder.lock(MANIFEST):
        folder.write_final_status("{}")
    assert (tmp_path / "status.json").read_text() == "{}"
    lock_once(folder)
    assert not (tmp_path / "status.json").exists(), (
        "the status of an earlier process must not be shown for a killed node"
    )


def test_is_locked(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    assert not is_locked(tmp_path)
    with folder.lock(MANIFEST):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    lock_once(folder)


def test_failed_write_leaves_the_old_content_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def fail_full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail_full_disk)
    with pytest.raises(StorageError, match="No space left on device; free some"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("files", "key", "advice"),
    [
        (("key",), "", "continue the old run with `murmur join {folder}`; or choose another --dir"),
        ((), "", "continue the old run with `murmur up --dir {folder}`; or choose another --dir"),
        (("key", "events.jsonl"), "", "-> 5; or choose another --dir"),
        (("key",), PEER, "-> 5; its organiser can change that while it runs (`murmur steer`); continue the old run"),
    ],
)
def test_folder_of_another_run_offers_the_way_on(tmp_path: Path, files: tuple[str, ...], key: str, advice: str) -> None:
    """Control: a key that nobody can steer is not said to be steerable."""
    run = MANIFEST.run.model_copy(update={"organiser_key": key})
    present = MANIFEST.model_copy(update={"run": run})
    lock_once(RunDir(tmp_path), present)
    for name in files:
        (tmp_path / name).touch()
    target = MANIFEST.target.model_copy(update={"rounds": 5})
    with pytest.raises(OtherRunError) as caught:
        lock_once(RunDir(tmp_path), present.model_copy(update={"target": target}))
    assert advice.format(folder=tmp_path) in str(caught.value)
    model = MANIFEST.model.model_copy(update={"layers": 3})
    with pytest.raises(OtherRunError) as caught:
        lock_once(RunDir(tmp_path), present.model_copy(update={"model": model}))
    assert "steer" not in str(caught.value)
