import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from node.commands.up.peer_process import LOG_TAIL_BYTES, PeerProcess
from node.monitoring.status import NodeStatus
from protocol.errors import StorageError

pytestmark = pytest.mark.slow

Make = Callable[..., PeerProcess]
SLEEPS = ("sleep", "60")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[PeerProcess] = []

    def build(*command: str) -> PeerProcess:
        made.append(PeerProcess("peer-0", tmp_path / "peer-0", command))
        return made[-1]

    yield build
    for peer in made:
        peer.kill()


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def ended(peer: PeerProcess) -> None:
    holds(lambda: not peer.is_running)


def holds(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def status(since: float, bytes_sent: int = 7) -> str:
    made = NodeStatus(peer_id="p", run="r", run_id="0", round=9, since=since, bytes_sent=bytes_sent)
    return made.model_dump_json()


def test_states_of_a_peer_process(make: Make) -> None:
    peer = make(*SLEEPS)
    assert (peer.summary().state, peer.returncode, peer.is_running) == ("starting", None, False)
    peer.start(())
    assert (peer.summary().state, peer.is_running) == ("starting", True)
    peer.kill()
    assert (peer.summary().state, peer.returncode) == ("lost", -signal.SIGKILL)
    well = make(*python("pass"))
    well.start(())
    ended(well)
    assert well.summary().state == "ended"


def test_kill_ends_the_whole_process_group(make: Make) -> None:
    """Control: a signal to the process alone leaves its child running."""
    program = "import subprocess; child = subprocess.Popen(['sleep', '60']); child.wait()"
    for whole in (True, False):
        peer = make(*python(program))
        peer.start(())
        assert peer._process
        parent = psutil.Process(peer._process.pid)
        holds(lambda parent=parent: bool(parent.children()))  # type: ignore[misc]
        child = parent.children()[0]
        if whole:
            peer.kill()
        else:
            parent.kill()
        _, left = psutil.wait_procs([child], timeout=10 if whole else 0.2)
        for stray in left:
            stray.kill()
        assert bool(left) is not whole


def test_interrupt_of_the_terminal_does_not_reach_the_peer(make: Make) -> None:
    peer = make(*SLEEPS)
    peer.start(())
    assert peer._process
    assert os.getpgid(peer._process.pid) == peer._process.pid != os.getpgid(0)


def test_output_is_appended_to_the_log(make: Make) -> None:
    for _ in range(2):
        peer = make(*python("import sys; print('out', flush=True); print('oh no', file=sys.stderr)"))
        peer.start(())
        ended(peer)
    assert peer.log.read_text().count("oh no") == 2
    assert peer.log_tail(1) == ["oh no"]
    peer.log.write_bytes(b"\xff" * 10 * LOG_TAIL_BYTES)
    assert len(peer.log_tail()[0]) == LOG_TAIL_BYTES


def test_node_info_of_an_earlier_start_is_ignored(make: Make) -> None:
    peer = make(*SLEEPS)
    peer.start(())
    assert peer._process
    values = {"pid": peer._process.pid + 1, "addresses": ["/a"], "metrics_port": 1}
    (peer.folder / "node.json").write_text(json.dumps(values))
    assert peer.addresses() == ()
    (peer.folder / "node.json").write_text(json.dumps(values | {"pid": peer._process.pid}))
    assert peer.addresses() == ("/a",)


async def test_final_status_is_read_unless_it_is_of_an_earlier_start(make: Make) -> None:
    peer = make(*python("pass"))
    peer.start(())
    ended(peer)
    (peer.folder / "status.json").write_text(status(since=time.time() - 3600))
    await peer.poll()
    assert peer.status is None
    (peer.folder / "status.json").write_text(status(since=time.time()))
    await peer.poll()
    assert peer.status and peer.status.round == 9
    assert peer.totals.bytes_sent == 7


async def test_peer_that_does_not_answer_keeps_its_last_status(make: Make, unused_tcp_port: int) -> None:
    peer = make(*SLEEPS)
    peer.start(())
    assert peer._process
    peer.status = NodeStatus.model_validate_json(status(since=time.time()))
    values = {"pid": peer._process.pid, "addresses": [], "metrics_port": unused_tcp_port}
    (peer.folder / "node.json").write_text(json.dumps(values))
    await peer.poll()
    assert peer.status.round == 9


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    peer = PeerProcess("peer-0", tmp_path / "file" / "peer-0", SLEEPS)
    with pytest.raises(StorageError, match="cannot write .*peer-0/log: Not a directory; choose another --dir"):
        peer.start(())
