import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from node.commands.status import key_line, status_lines
from node.monitoring.metrics import Metrics, serve_metrics
from node.monitoring.status import NodeStatus
from node.paths import registered, running_dirs
from node.run_dir import RunDir
from protocol.errors import IdentityError, MissingFileError, StorageError, UnreachableError, UsageError
from tests.node.monitoring.fixed_status import FixedStatus
from tests.node.small_run import MANIFEST

LOOPBACK = "127.0.0.1:0"
STATUS = NodeStatus(peer_id="p", run="demo", run_id="0", phase="training", round=4, target_rounds=30)


def node(folder: Path, port: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "node.json").write_text(json.dumps({"metrics_port": port, "peer_id": STATUS.peer_id}))
    return folder


async def test_a_line_for_each_node_of_a_swarm(tmp_path: Path, unused_tcp_port: int) -> None:
    counted = {"absences": {"slow": 1, "late": 2}, "refusals": {"forged": 1}}
    status = STATUS.model_copy(update=counted)
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(status)) as port:
        node(tmp_path / "peer-0", port)
        left = node(tmp_path / "peer-1", unused_tcp_port)
        node(tmp_path / "peer-2", unused_tcp_port)
        done = STATUS.model_copy(update={"phase": "done", "round": 30, "step": 600})
        (left / "status.json").write_text(done.model_dump_json())
        lines = await asyncio.to_thread(status_lines, tmp_path, False)
        assert lines == await asyncio.to_thread(status_lines, tmp_path, False, True)
        objects = json.loads((await asyncio.to_thread(status_lines, tmp_path, True))[0])
    assert lines[0] == f"peer-0: {STATUS.summary()}"
    assert lines[1:3] == ["    missed rounds: late 2, slow 1", "    refused: forged 1"]
    assert lines[3] == "peer-1: does not run; when it ended: round 30/30, step 600, the target was reached"
    assert lines[4] == "peer-2: does not run; start it with `murmur join RUN`"
    assert objects[str(tmp_path / "peer-0")]["round"] == 4
    stopped = objects[str(tmp_path / "peer-1")]
    assert stopped == {"stopped": lines[3].removeprefix("peer-1: "), "last": done.model_dump(mode="json")}
    assert objects[str(tmp_path / "peer-2")] == {"stopped": lines[4].removeprefix("peer-2: "), "last": None}


async def test_a_port_that_is_anothers_by_now_tells_nothing(tmp_path: Path) -> None:
    another = STATUS.model_copy(update={"peer_id": "q"})
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(another)) as port:
        node(tmp_path / "peer-0", port)
        lines = await asyncio.to_thread(status_lines, tmp_path, False)
    assert lines == ["peer-0: does not run; start it with `murmur join RUN`"]


def test_a_check_fails_where_no_node_answers(tmp_path: Path, unused_tcp_port: int) -> None:
    node(tmp_path / "peer-0", unused_tcp_port)
    assert len(status_lines(tmp_path, False)) == 1
    watched = STATUS.model_copy(update={"phase": "watching"})
    (tmp_path / "peer-0" / "status.json").write_text(watched.model_dump_json())
    folder = tmp_path / "peer-0"
    command = f"`murmur host {folder}/run.toml --dir {folder}`"
    expected = f"peer-0: does not run; when it ended: round 4/30; start it with {command}"
    assert status_lines(tmp_path, False) == [expected]
    with pytest.raises(UnreachableError, match="no node answers: peer-0 does not run"):
        status_lines(tmp_path, False, check=True)


def test_the_reason_of_an_end_is_told(tmp_path: Path, unused_tcp_port: int) -> None:
    left = STATUS.model_copy(update={"phase": "leaving", "step": 300, "reason": "the trainer does not start"})
    (node(tmp_path / "peer-0", unused_tcp_port) / "status.json").write_text(left.model_dump_json())
    expected = (
        "peer-0: does not run; when it ended: round 4/30, step 300, leaving: the trainer does not start; "
        "resume it with `murmur join RUN`"
    )
    assert status_lines(tmp_path, False) == [expected]


def test_what_peers_said_does_not_steer_the_terminal(tmp_path: Path, unused_tcp_port: int) -> None:
    said = "refused (x\npeer-1: forged\x1b[2J)"
    left = STATUS.model_copy(update={"phase": "leaving", "reason": said})
    (node(tmp_path / "peer-0", unused_tcp_port) / "status.json").write_text(left.model_dump_json())
    assert status_lines(tmp_path, False)[0].endswith(
        "leaving: refused (x\ufffdpeer-1: forged\ufffd[2J); resume it with `murmur join RUN`"
    )
    assert not said.isprintable(), "the control: it would"


def test_a_node_that_starts_is_not_told_to_start(tmp_path: Path, unused_tcp_port: int) -> None:
    with RunDir(node(tmp_path / "peer-0", unused_tcp_port)).lock(MANIFEST):
        assert status_lines(tmp_path, False) == ["peer-0: is starting, or does not answer"]
        with pytest.raises(UnreachableError, match="no node answers: peer-0 is starting, or does not answer"):
            status_lines(tmp_path, False, check=True)
        starting = {"stopped": "is starting, or does not answer", "last": None}
        assert json.loads(status_lines(tmp_path, True)[0]) == {str(tmp_path / "peer-0"): starting}
        folder = tmp_path / "peer-0"
    assert status_lines(tmp_path, False) == [f"peer-0: does not run; start it with `murmur join {folder}`"]


def test_status_of_nowhere(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        status_lines(tmp_path / "nowhere", False)


def test_key_is_made_once_and_shown_again(tmp_path: Path) -> None:
    peer_id = key_line(tmp_path / "new" / "node", create=True)
    assert peer_id.startswith("12D3KooW")
    assert key_line(tmp_path / "new" / "node") == key_line(tmp_path / "new" / "node", create=True) == peer_id


def test_mistyped_folder_gets_no_key(tmp_path: Path) -> None:
    for folder in (tmp_path / "nod", tmp_path):
        with pytest.raises(UsageError, match="no node has run in .*; correct the folder"):
            key_line(folder)
    assert list(tmp_path.iterdir()) == []


def test_no_key_where_no_node_is(tmp_path: Path) -> None:
    """A key would make a node of the folder of a swarm, and `murmur status` would see no other there."""
    (tmp_path / "swarm" / "peer-0").mkdir(parents=True)
    with pytest.raises(UsageError, match="whole swarm; name one of its peers, such as .*swarm/peer-0"):
        key_line(tmp_path / "swarm")
    assert not (tmp_path / "swarm" / "key").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is not a directory; name a node's folder"):
        key_line(tmp_path / "file")
    with pytest.raises(StorageError, match="cannot use the folder .*; name a node's folder"):
        key_line(tmp_path / "file" / "node", create=True)


def test_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key_line(tmp_path, create=True)
    os.chmod(tmp_path / "key", 0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        key_line(tmp_path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


async def test_without_a_folder_all_running_nodes_are_shown_wherever_they_are(home: Path) -> None:
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(STATUS)) as port:
        folders = [node(home / place, port) for place in ("far/node", "here/runs/demo-1/peer-0", "far/stopped")]
        with contextlib.ExitStack() as running:
            for folder in folders[:2]:
                running.enter_context(RunDir(folder).lock(MANIFEST))
                running.enter_context(registered(folder))
            with registered(folders[2]):
                shutil.copytree(home / "state/murmur/running", home / "entries")
            shutil.copytree(home / "entries", home / "state/murmur/running", dirs_exist_ok=True)  # as after a kill
            assert len(list((home / "state/murmur/running").iterdir())) == 3
            lines = await asyncio.to_thread(status_lines, None, False)
            assert lines == [f"~/far/node: {STATUS.summary()}", f"runs/demo-1/peer-0: {STATUS.summary()}"]
            assert len(list((home / "state/murmur/running").iterdir())) == 2, "the stale entry is removed"
    assert list((home / "state/murmur/running").iterdir()) == []


def test_without_a_running_node_the_last_one_and_its_command_are_shown(home: Path, unused_tcp_port: int) -> None:
    with pytest.raises(UsageError, match="no node has run here yet"):
        status_lines(None, False)
    folder = node(home / "state/murmur/demo-1234", unused_tcp_port)
    with RunDir(folder).lock(MANIFEST):
        pass
    expected = (
        f"no node runs now; the last one: ~/state/murmur/demo-1234: does not run; start it with `murmur join {folder}`"
    )
    assert status_lines(None, False) == [expected]
    with pytest.raises(UnreachableError):
        status_lines(None, False, check=True)


def test_next_node_removes_the_entries_of_folders_that_are_gone(home: Path) -> None:
    (home / "gone").mkdir()
    with registered(home / "gone"):
        shutil.copytree(home / "state/murmur/running", home / "entries")
    shutil.copytree(home / "entries", home / "state/murmur/running", dirs_exist_ok=True)
    (home / "gone").rmdir()
    with registered(home / "here"):
        assert len(list((home / "state/murmur/running").iterdir())) == 1


def test_node_runs_though_it_cannot_be_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with registered(tmp_path):
        assert running_dirs() == []
