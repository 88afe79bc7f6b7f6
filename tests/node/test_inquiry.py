import json
import os
from pathlib import Path

import pytest

from node.daemon.metrics import Metrics, metrics_server
from node.inquiry import key_line, status_lines
from node.status import NodeStatus
from protocol.errors import IdentityError, MissingFileError, UnreachableError

LOOPBACK = "127.0.0.1:0"
STATUS = NodeStatus(peer_id="p", run="demo", run_id="0", phase="training", round=4, target_rounds=30)


def node(folder: Path, port: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "node.json").write_text(json.dumps({"metrics_port": port}))
    return folder


async def test_a_line_for_each_node_of_a_swarm(tmp_path: Path, unused_tcp_port: int) -> None:
    import asyncio

    counted = {"absences": {"slow": 1, "late": 2}, "refusals": {"forged": 1}}
    status = STATUS.model_copy(update=counted)
    async with metrics_server(LOOPBACK, Metrics(), lambda: status) as port:
        node(tmp_path / "peer-0", port)
        left = node(tmp_path / "peer-1", unused_tcp_port)
        node(tmp_path / "peer-2", unused_tcp_port)
        done = STATUS.model_copy(update={"phase": "done", "round": 30, "step": 600})
        (left / "status.json").write_text(done.model_dump_json())
        lines = await asyncio.to_thread(status_lines, tmp_path, False)
        assert lines == await asyncio.to_thread(status_lines, tmp_path, False, True)
        objects = json.loads((await asyncio.to_thread(status_lines, tmp_path, True))[0])
    assert lines[0] == f"peer-0: {STATUS.summary()}"
    assert lines[1:3] == ["    rounds without its work: late 2, slow 1", "    refused: forged 1"]
    assert lines[3] == "peer-1: does not run; when it ended: round 30/30, step 600, done"
    assert lines[4] == "peer-2: does not run; start it with `murmur join`"
    assert objects[str(tmp_path / "peer-0")]["round"] == 4
    assert objects[str(tmp_path / "peer-1")] is None


def test_a_check_fails_where_no_node_answers(tmp_path: Path, unused_tcp_port: int) -> None:
    node(tmp_path / "peer-0", unused_tcp_port)
    assert len(status_lines(tmp_path, False)) == 1
    watched = STATUS.model_copy(update={"phase": "watching"})
    (tmp_path / "peer-0" / "status.json").write_text(watched.model_dump_json())
    expected = "peer-0: does not run; when it ended: round 4/30; start it with `murmur host`"
    assert status_lines(tmp_path, False) == [expected]
    with pytest.raises(UnreachableError, match="no node answers: peer-0 does not run"):
        status_lines(tmp_path, False, check=True)


def test_status_of_nowhere(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        status_lines(tmp_path / "nowhere", False)


def test_key_is_made_once_and_shown_again(tmp_path: Path) -> None:
    peer_id = key_line(tmp_path / "new" / "node")
    assert peer_id.startswith("12D3KooW")
    assert key_line(tmp_path / "new" / "node") == peer_id


def test_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key_line(tmp_path)
    os.chmod(tmp_path / "key", 0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        key_line(tmp_path)
