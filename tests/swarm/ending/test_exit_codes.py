"""What a person did wrong, from the command line: one line that says what to do, and the documented exit code."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.monitoring.peer_lines import shorten_peer_id
from tests.swarm.process_swarm import (
    ENDLESS,
    ProcessSwarm,
    isolated_processes,
    join_command,
    manifest_with,
    running_swarm,
    write_run,
)

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "exit-codes.md"
NOBODY = "12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"
NOWHERE = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
DISK_BYTES = 1 << 20


def documented_codes() -> set[int]:
    return {int(found) for found in re.findall(r"^\| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)}


def refusal(command: list[str]) -> tuple[int, str]:
    """Exit code and the one line of a command that is refused."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("murmur: ")]
    others = [line for line in ended.stderr.splitlines() if not line.startswith("murmur: ") and not is_log(line)]
    assert len(lines) == 1 and not others, ended.stderr
    assert ended.returncode in documented_codes()
    assert not ended.stdout
    return ended.returncode, lines[0]


def is_log(line: str) -> bool:
    return re.match(r"\d\d:\d\d:\d\d ", line) is not None


@pytest.fixture(autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tmp_path_factory.getbasetemp()  # outside: the world's own folder for temporary files goes with it
    with isolated_processes() as mark:
        yield mark


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 1}))


def rewritten(run: Path, old: str, new: str) -> Path:
    text = run.read_text()
    assert text.count(old) == 1
    changed = run.with_name("changed.toml")
    changed.write_text(text.replace(old, new))
    return changed


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("inner_steps = 5", "inner_stepz = 5", ("inner_stepz", "inner_steps")),
        ("warmup_steps = 5", "warmup_step = 5", ("warmup_step (line ", "did you mean warmup_steps?")),
        ("[model]", "[model", ("not valid TOML",)),
    ],
)
def test_manifests_that_are_wrong(run: Path, tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    code, line = refusal(join_command(rewritten(run, old, new), tmp_path / "node"))
    assert code == 3
    assert all(word in line for word in words), line


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    code, line = refusal(join_command(tmp_path / "nowhere.toml", tmp_path / "node"))
    assert code == 4
    assert str(tmp_path / "nowhere.toml") in line


def test_a_key_that_others_may_read(run: Path, tmp_path: Path) -> None:
    home = tmp_path / "node"
    subprocess.run([sys.executable, "-m", "node.cli", "key", str(home), "--create"], check=True, capture_output=True)
    (home / "key").chmod(0o644)
    code, line = refusal(join_command(run, home))
    assert code == 5
    assert f"chmod 600 {home / 'key'}" in line


def test_text_that_is_not_there(run: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").unlink()
    code, line = refusal(join_command(run, tmp_path / "node"))
    assert code == 4
    assert "corpus.txt" in line


def test_a_folder_in_use_or_of_another_run_or_model(tmp_path: Path) -> None:
    with running_swarm(tmp_path, manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 1}), peers=1) as swarm:
        swarm.start_first()
        swarm.wait_for_round(1)
        home = swarm.peers[0].folder
        code, line = refusal(join_command(swarm.run, home))
        assert code == 6 and str(home) in line
        assert swarm.peers[0].is_running, "the first one is not disturbed"
        swarm.leave()
        other_model_is_refused(swarm, home)


def other_model_is_refused(swarm: ProcessSwarm, home: Path) -> None:
    wider = rewritten(swarm.run, "width = 32", "width = 48")
    code, line = refusal(join_command(wider, home))
    assert code == 7 and str(home) in line
    (home / "run.toml").unlink()  # a person who insists
    code, line = refusal(join_command(wider, home))
    assert code in (7, 8) and str(home) in line


def test_bootstrap_peers_that_nobody_reaches(tmp_path: Path) -> None:
    with running_swarm(tmp_path, manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 1}), peers=1) as swarm:
        [peer] = swarm.peers
        peer.start([NOWHERE])
        tries: list[int] = []

        def tried_again() -> bool:
            waits = [int(found) for found in re.findall(r"no answer from .* trying again in (\d+) s", swarm.log(peer))]
            tries[:] = waits
            return len(waits) >= 3

        swarm.wait_until(tried_again, "three attempts")
        assert tries[2] > tries[0], "with growing pauses"
        assert f"no answer from {shorten_peer_id(NOBODY)} at {NOWHERE.partition('/p2p/')[0]} (" in swarm.log(peer)
        [status] = swarm.poll(peer)
        assert (status.phase, status.round) == ("joining", 0)
        assert "looking for the peers" in status.describe_contributing()
        peer.interrupt()
        left = swarm.wait_until(lambda: peer.returncode is not None, "it leaves", 15)
        assert peer.returncode == 0, swarm.describe()
        print(f"left within {left:.1f} s")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "murmur-test", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a file system that is full needs the right to mount one; nobody gave it to this test")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_is_full(run: Path, small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(4096))
    code, line = refusal(join_command(run, small_disk / "node"))
    assert code == 9
    assert "disk space" in line and "free some space" in line
