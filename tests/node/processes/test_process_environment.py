"""The import path of child processes, the standard streams, and the signals that stop a process."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.processes.process import python_environment
from protocol.errors import MissingFileError, StorageError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MURMUR = (sys.executable, "-P", "-m", "node.cli")
PLANTED = ("random.py", "optim/__init__.py", "node/__init__.py")
SAFE = ("env=python_environment()", "**python_environment()", '"-P"', '"-I"')  # one of these in every starter
IMPORTS = "import random, optim, node"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Return a folder with modules that leave a file `ran` when they are imported."""
    for name in PLANTED:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return tmp_path


def test_children_do_not_import_from_the_working_directory(planted: Path) -> None:
    """Control: with the environment as it is, the planted code runs."""
    for environment in (python_environment(), dict(os.environ)):
        command = [sys.executable, "-c", IMPORTS]
        subprocess.run(command, cwd=planted, env=environment, check=True, timeout=60, capture_output=True)
        assert (planted / "ran").exists() == ("PYTHONSAFEPATH" not in environment)


@pytest.mark.parametrize("package", ["node", "protocol", "optim"])
def test_every_python_process_has_a_safe_import_path(package: str) -> None:
    starters = [path for path in (ROOT / package).rglob("*.py") if "sys.executable" in path.read_text(encoding="utf-8")]
    assert starters or package == "optim"
    for path in starters:
        assert any(sign in path.read_text(encoding="utf-8") for sign in SAFE), path


def test_children_import_the_same_checkout(tmp_path: Path) -> None:
    """Also in a checkout that is not installed, where `python -m node.cli` finds it through the working directory."""
    program = (
        "import os, sys; from node.processes.process import python_environment as own; print(own().get('PYTHONPATH'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[0] = {str(ROOT)!r}; {program}"],
        cwd=tmp_path, env=environment, check=True, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout == f"{ROOT}\n"


@pytest.mark.swarm
def test_peers_and_trainers_do_not_import_from_the_working_directory(planted: Path) -> None:
    """Control: `python -m node.trainer` there runs the planted code."""
    words = ["up", str(ROOT / "configs" / "test.toml"), "--peers", "1", "--rounds", "1", "--dir", str(planted / "run")]
    environment = {**python_environment(), "PYTHONPATH": str(ROOT)}
    del environment["PYTHONSAFEPATH"]
    subprocess.run([*MURMUR, *words], cwd=planted, env=environment, check=True, timeout=200, capture_output=True)
    assert not (planted / "ran").exists()
    subprocess.run([sys.executable, "-m", "node.trainer"], cwd=planted, check=False, timeout=60, capture_output=True)
    assert (planted / "ran").exists()


def shell(line: str) -> subprocess.CompletedProcess[str]:
    command = line.replace("murmur", " ".join(MURMUR))
    return subprocess.run(["bash", "-c", command], env=python_environment(), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "line",
    [
        "murmur recipes >&-",
        "murmur recipes 0>&- 2>&-",
        "murmur --help | head -1",
        "murmur recipes | true",
        "(sleep 1; murmur recipes --json) | true",
        "murmur recipes nothing 2>&-",
        "murmur recipes nothing >&- 2>&-",
    ],
)
def test_closed_streams_end_a_command_quietly(line: str) -> None:
    assert shell(line).stderr == ""


def test_full_disk_behind_standard_output_is_one_line() -> None:
    result = shell("murmur recipes > /dev/full")
    assert result.returncode == StorageError.exit_code
    assert result.stderr == "murmur: cannot write the output: No space left on device; free some space\n"
    assert shell("murmur recipes nothing 2> /dev/full").returncode == 2


def test_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    result = shell(f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && murmur recipes")
    assert result.returncode == MissingFileError.exit_code
    assert result.stderr == "murmur: the working directory no longer exists; change to another one\n"


CLOSED = """
import os, sys
if {prepared}:
    from node.processes.process import prepare_standard_streams
    prepare_standard_streams()
print(os.open("data", os.O_CREAT | os.O_WRONLY), file=open("number", "w"))
"""


@pytest.mark.parametrize("prepared", [True, False])
def test_file_does_not_take_the_number_of_a_closed_stream(tmp_path: Path, prepared: bool) -> None:
    """Control: without the preparation it does, and a library that writes to standard error writes into it."""
    program = CLOSED.format(prepared=prepared)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f'exec {sys.executable} -c "$0" 2>&-', program]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)
    assert (int((tmp_path / "number").read_text()) > 2) == prepared


def test_terminal_that_is_not_utf8_gets_a_replacement() -> None:
    """Control: Python alone fails."""
    program = "print('Gr\\u00fc\\u00dfe')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for prepared in (True, False):
        first = "from node.processes import process; process.prepare_standard_streams(); " if prepared else ""
        command = [sys.executable, "-c", first + program]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
        assert (ended.returncode, ended.stdout) == ((0, b"Gr??e\n") if prepared else (1, b""))


STOPPED = """
import asyncio, os, signal, sys
from node.processes.process import handle_stop_signals
async def main():
    first = asyncio.Event()
    handle_stop_signals(asyncio.get_running_loop(), first.set)
    print("ready", flush=True)
    await first.wait()
    print("leaving", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def start_stoppable(ignore_hangup: bool = False) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STOPPED, cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        preexec_fn=(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) if ignore_hangup else None,
    )  # fmt: skip
    assert await read_line(process) == "ready"
    return process


async def read_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_first_signal_asks_and_second_one_ends(number: signal.Signals) -> None:
    """SIGHUP never ends it: the kernel and the shell both send one when a terminal closes."""
    process = await start_stoppable()
    process.send_signal(number)
    assert await read_line(process) == "leaving"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == 130


async def test_hangup_is_ignored_under_nohup() -> None:
    process = await start_stoppable(ignore_hangup=True)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert await read_line(process) == "leaving"
    process.kill()
    await process.wait()
