"""What a person reads while a loop of her own waits, and at the end of the run."""

import http.server
import json
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from murmuration import daemon
from murmuration.daemon import LOG, NodeProcess
from murmuration.swarm import QUIET_SECONDS, REPEAT_SECONDS, WaitNotices, describe_wait
from node.monitoring.status import NodeStatus, Phase
from protocol.errors import AlreadyRunningError


def status(phase: Phase, reason: str = "", round_number: int = 0) -> NodeStatus:
    return NodeStatus(peer_id="p", run="r", run_id="0", phase=phase, reason=reason, round=round_number)


WAITING = status("waiting for peers", "1 of 2 peers are here")


def test_wait_is_explained_after_some_seconds_then_at_each_change() -> None:
    notices, shown = WaitNotices(), []
    for second in range(int(3 * REPEAT_SECONDS)):
        found = WAITING if second < 2 * REPEAT_SECONDS else status("catching up", "to round 7")
        if notices.is_due(second) and (line := notices.line(second, found)):
            shown.append((second, line))
    assert shown[0] == (QUIET_SECONDS, "waiting for peers: 1 of 2 peers are here (for 5 s)")
    assert [second for second, _ in shown] == [5, 65, 120] and shown[-1][1].startswith("catching up: to round 7")


def test_short_waits_say_nothing() -> None:
    notices = WaitNotices()
    for second in range(100):
        assert not notices.is_due(second)
        if second % 4 == 3:
            notices.end()


def test_wait_for_a_round_names_it() -> None:
    assert describe_wait(status("training", round_number=6)) == "waiting for the result of round 7"
    assert "daemon.log" in describe_wait(None)
    assert describe_wait(status("paused", "the organiser has paused the run")).startswith("paused: the")


def test_status_of_the_node_is_asked_without_an_event_loop(tmp_path: Path) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = WAITING.model_dump_json().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    node = NodeProcess(tmp_path)
    assert node.status() is None, "no node has started"
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "node.json").write_text(json.dumps({"pid": 1, "metrics_port": server.server_port}))
        assert node.status() == WAITING
        server.shutdown()
    assert node.status() is None


def test_last_lines_are_those_of_the_newest_end(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path)
    assert node.last_lines(0.1) == []
    (tmp_path / LOG).write_text(
        "12:00:00 round 3\nthe run is over: round 2, 5 tokens\n12:01:00 again\nthe run is over: round 3, 9 tokens\n"
        "12:02:00 leaving\nto get the model as a folder: murmur export x OUT\nyour part: 9 tokens\nTraceback\n"
    )
    assert node.last_lines(0.1) == [
        "the run is over: round 3, 9 tokens",
        "to get the model as a folder: murmur export x OUT",
        "your part: 9 tokens",
    ]
    node._process = subprocess.Popen(["sleep", "20"])
    try:
        assert node.last_lines(0.2) == [], "it still runs"
    finally:
        node._process.kill()
        node._process.wait()


class SilentNode(NodeProcess):
    """A node that is still starting, and holds no lock yet."""

    process: "subprocess.Popen[bytes]"

    def _start(self, run: str, arguments: object) -> None:
        self.process = self._process = subprocess.Popen(["sleep", "60"])


def test_node_that_does_not_answer_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "START_SECONDS", 0.3)
    node = SilentNode(tmp_path)
    with pytest.raises(AlreadyRunningError, match="does not answer"):
        node.connect("run.toml", ())
    assert node.process.poll() == -signal.SIGTERM, "it would train on, and nobody would know"
    node.end()
