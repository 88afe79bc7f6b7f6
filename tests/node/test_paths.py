import json
import os
from pathlib import Path

import pytest

from node import paths
from protocol.errors import CheckpointError, MissingFileError, UsageError
from protocol.manifest.reading import load_manifest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both places where runs lie are in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def node(folder: Path, port: int = 1, age: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    file = folder / "node.json"
    file.write_text(json.dumps({"metrics_port": port}))
    os.utime(file, (1e9 - age, 1e9 - age))
    return folder


def checkpoint(folder: Path, number: int, round_number: int) -> Path:
    path = folder / "checkpoints" / f"{number:010d}.round-{round_number}"
    path.mkdir(parents=True)
    return path


def test_fresh_swarm_never_takes_a_folder_that_exists() -> None:
    assert paths.next_swarm_dir("demo") == Path("runs/demo-1")
    Path("runs/demo-1").mkdir(parents=True)
    assert paths.next_swarm_dir("demo") == Path("runs/demo-2")
    assert paths.next_swarm_dir("other") == Path("runs/other-1")


def test_joined_folder_is_the_same_for_the_same_run(home: Path) -> None:
    manifest = load_manifest(paths.demo_manifest())
    expected = home / "state" / "murmur" / f"demo-{manifest.run_id[:8]}"
    assert paths.join_dir(manifest) == expected


def test_demo_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(paths, "DEMO_MANIFEST", home / "demo.toml")
    with pytest.raises(MissingFileError, match="name a manifest: murmur up RUN.toml"):
        paths.demo_manifest()


def test_node_folders_of_a_node_and_of_a_swarm(home: Path) -> None:
    peers = [node(home / "swarm" / f"peer-{index}") for index in range(2)]
    (home / "swarm" / "export").mkdir()
    assert paths.find_node_dirs(home / "swarm") == peers
    assert paths.find_node_dirs(peers[0]) == [peers[0]]


def test_without_a_folder_the_newest_is_meant(home: Path) -> None:
    joined = node(paths.state_home() / "demo-1234", age=50)
    old = [node(Path("runs") / "demo-1" / f"peer-{index}", age=100) for index in range(2)]
    assert paths.find_node_dirs(None) == [joined]
    new = [node(Path("runs") / "demo-2" / f"peer-{index}") for index in range(2)]
    assert paths.find_node_dirs(None) == new
    assert old[0] not in new
    hosted = node(paths.state_home() / "hosts" / "demo-1234", age=-1)
    assert paths.find_node_dirs(None) == [hosted]


def test_no_folder_no_node_nothing_run(home: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere is not a directory"):
        paths.find_node_dirs(home / "nowhere")
    with pytest.raises(UsageError, match="no node has run in"):
        paths.find_node_dirs(home)
    with pytest.raises(UsageError, match="no node has run here yet; start one"):
        paths.find_node_dirs(None)


def test_trained_folder_is_that_of_the_latest_round_not_of_the_most_saves(home: Path) -> None:
    swarm = home / "swarm"
    checkpoint(swarm / "peer-0", number=40, round_number=9)
    checkpoint(swarm / "peer-1", number=2, round_number=10)
    (swarm / "peer-2" / "checkpoints").mkdir(parents=True)
    assert paths.find_trained_dir(swarm) == swarm / "peer-1"
    assert paths.find_trained_dir(swarm / "peer-0") == swarm / "peer-0"


def test_newest_checkpoint_is_the_last_save_though_its_round_is_lower(home: Path) -> None:
    checkpoint(home, number=1, round_number=12)
    last = checkpoint(home, number=2, round_number=7)
    (home / "checkpoints" / ".0000000003.round-8").mkdir()
    (home / "checkpoints" / f"{last.name}{paths.KEEP_MARK}").touch()
    assert paths.find_newest_checkpoint(home) == last
    assert paths.find_newest_checkpoint(home / "elsewhere") is None


def test_model_of_a_pipeline_is_that_of_the_newest_round_of_all_stages(home: Path) -> None:
    swarm = home / "swarm"
    for stage, folder, rounds in ((0, "peer-0", (4, 5)), (1, "peer-1", (4,)), (1, "peer-0/stage-1", (5,))):
        for round_number in rounds:
            checkpoint(swarm / folder, number=round_number, round_number=round_number)
        (swarm / folder / "stage.json").write_text(json.dumps({"stage": stage, "stages": 2}))
    assert paths.find_newest_model([swarm]) == (5, swarm) and paths.find_trained_dir(swarm) == swarm
    assert [saved.parents[1] for saved in paths.newest_checkpoints(swarm)] == [
        swarm / "peer-0", swarm / "peer-0" / "stage-1",
    ]  # fmt: skip
    assert paths.find_newest_model([swarm / "peer-0"]) == (5, swarm / "peer-0"), "its own stage and the kept one"
    assert paths.find_newest_model([swarm / "peer-1"]) is None, "nobody there has stage 0"


def test_nothing_trained(home: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        paths.find_trained_dir(home)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"metrics_port": "x"}'])
def test_port_of_a_torn_file_is_unknown(home: Path, content: str) -> None:
    folder = node(home / "node", port=4321)
    assert paths.read_metrics_port(folder) == 4321
    (folder / "node.json").write_text(content)
    assert paths.read_metrics_port(folder) is None and paths.read_peer_id(folder) is None


def test_user_without_a_home_directory_must_name_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control: with one, or with XDG_STATE_HOME, there is a default folder."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert paths.state_home().name == "murmur"
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match="this user has no home directory; set HOME or XDG_STATE_HOME, or name the --dir"
    ):
        paths.state_home()
    assert paths.joined_dirs() == []
    with pytest.raises(UsageError, match="no node has run here yet"):
        paths.find_node_dirs(None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert paths.state_home() == tmp_path / "murmur"
