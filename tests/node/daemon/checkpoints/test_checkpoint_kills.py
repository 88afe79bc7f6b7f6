"""Saves that are cut short: killed at every system call and at random moments, and failed by a full or broken disk.

Run as a script, this file is a server that forks a child a request, so that a kill costs milliseconds and not an import
of torch. A child waits at a gate until it is traced (or not), then does its job: a save, or the control, the same bytes
written over the live files, each synced. The control must be found broken at least half of the time, or these tests
would show nothing.
"""

import ctypes
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, load_newest, save
from node.model import shape_table
from protocol.errors import StorageError
from protocol.manifest.model import ModelSection

pytestmark = pytest.mark.slow

SHAPES = shape_table(ModelSection(vocabulary=256, width=64, layers=1, heads=2, hidden=96, context=8))
RUN_ID = "ab" * 32
KEEP = 2
FILES = 5  # of a checkpoint: anchor, momentum, inner vectors, chain and manifest
HARMLESS = {"brk", "mmap", "munmap", "mremap", "madvise", "mprotect", "futex", "read", "prctl", "exit_group"}
FULL = dict.fromkeys(("mkdir", "openat", "write", "rename"), "ENOSPC")
BROKEN = dict.fromkeys(("fsync", "unlinkat", "unlink", "rmdir"), "EIO")
POINTS_AT_LEAST = 40
Prepare = Callable[[Path], Callable[[], int]]
ALLOW_ANY_TRACER = 0x59616D61, -1  # prctl PR_SET_PTRACER, PR_SET_PTRACER_ANY


@functools.cache
def example(round_number: int) -> Checkpoint:
    def vector(seed: int) -> torch.Tensor:
        return torch.randn(SHAPES.numel, generator=torch.Generator().manual_seed(100 * round_number + seed))

    return Checkpoint(
        run_id=RUN_ID,
        shapes=SHAPES.hash(),
        round=round_number,
        digest=bytes(32),
        chain=SavedChain({}, b""),
        anchor=vector(0),
        outer={"momentum": vector(1)},
        inner={"weights": vector(2)},
        inner_meta={"step": round_number},
    )


def restored_round(folder: Path) -> int:
    """The round that a start would resume from: it holds exactly what was saved, and nothing was passed over for it."""
    loaded, skipped = load_newest(folder, RUN_ID, SHAPES)
    assert loaded is not None and skipped == []
    expected = example(loaded.round)
    assert torch.equal(loaded.anchor, expected.anchor)
    assert torch.equal(loaded.outer["momentum"], expected.outer["momentum"])
    assert torch.equal(loaded.inner["weights"], expected.inner["weights"]) and loaded.inner_meta == expected.inner_meta
    return loaded.round


def is_lost(folder: Path) -> bool:
    return load_newest(folder, RUN_ID, SHAPES)[0] is None


# What the children do. Each takes the folder of checkpoints and returns the job, whose result is the exit code; what
# need not be cut short happens before the job, in the server.


def save_once(folder: Path) -> Callable[[], int]:
    checkpoint = example(3)

    def job() -> int:
        try:
            save(folder, checkpoint, SHAPES, KEEP)
        except StorageError as error:
            return error.exit_code
        return 0

    return job


def save_for_ever(folder: Path) -> Callable[[], int]:
    """Writes the number of each round to `done` beside the folder once it is saved."""
    checkpoints = [example(round_number) for round_number in range(3, 203)]

    def job() -> int:
        done = os.open(folder.parent / "done", os.O_WRONLY | os.O_CREAT, 0o600)
        for checkpoint in checkpoints:
            save(folder, checkpoint, SHAPES, KEEP)
            os.write(done, f"{checkpoint.round}\n".encode())
        return 0

    return job


def overwrite_once(folder: Path) -> Callable[[], int]:
    """The control: round 3 written over the only checkpoint, file by file."""
    contents = contents_of(folder.parent / "other")

    def job() -> int:
        (live,) = folder.iterdir()
        overwrite(live, contents)
        return 0

    return job


def overwrite_for_ever(folder: Path) -> Callable[[], int]:
    (live,) = folder.iterdir()
    both = [contents_of(folder.parent / "other"), {file.name: file.read_bytes() for file in live.iterdir()}]

    def job() -> int:
        for turn in range(1000):
            overwrite(live, both[turn % 2])
        return 0

    return job


def contents_of(folder: Path) -> dict[str, bytes]:
    (only,) = folder.iterdir()
    return {file.name: file.read_bytes() for file in only.iterdir()}


def overwrite(live: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        with (live / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


JOBS = {job.__name__: job for job in (save_once, save_for_ever, overwrite_once, overwrite_for_ever)}


def serve() -> None:
    """A line with job and folder in, the child's process id out; a line in opens the gate; its wait status out."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(*ALLOW_ANY_TRACER, 0, 0, 0)
    while line := sys.stdin.readline():
        name, folder = json.loads(line)
        job = JOBS[name](Path(folder))
        gate, opener = os.pipe()
        child = os.fork()
        if child == 0:
            run_child(job, gate)
        print(child, flush=True)
        sys.stdin.readline()
        os.write(opener, b"!")
        print(os.waitpid(child, 0)[1], flush=True)
        os.close(gate)
        os.close(opener)


def run_child(job: Callable[[], int], gate: int) -> None:
    ctypes.CDLL(None).prctl(*ALLOW_ANY_TRACER, 0, 0, 0)
    code = 1
    try:
        os.read(gate, 1)
        code = job()
    finally:
        os._exit(code)


class Server:
    """The tests' side of `serve`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, line: str) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        return self.answer()

    def answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def traced(self, job: Prepare, folder: Path, *options: str) -> int:
        """The exit code of a job run under strace with `options`; negative: the signal that killed it."""
        child = self.ask(json.dumps([job.__name__, str(folder)]))
        command = ["strace", "-p", str(child), *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            attached = tracer.stderr.readline()
            status = self.ask("go")
            tracer.communicate(timeout=10)
        if "attached" not in attached:
            pytest.skip(f"strace may not trace here: {attached.strip()}")
        return os.waitstatus_to_exitcode(status)

    def killed_after(self, job: Prepare, folder: Path, seconds: float) -> int:
        child = self.ask(json.dumps([job.__name__, str(folder)]))
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        time.sleep(seconds)  # this is the random moment, not a wait for something
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(self.answer())

    def stop(self) -> None:
        self.process.communicate(timeout=10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.stop()


@pytest.fixture
def tracing(server: Server) -> Server:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: apt-get install strace")
    return server


class Folders:
    """Fresh copies of a folder of checkpoints: rounds 1 and 2 for saves, round 2 alone for the control."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.copies = 0
        for round_number in (1, 2):
            save(root / "pair", example(round_number), SHAPES, KEEP)
        save(root / "single", example(2), SHAPES, KEEP)
        save(root / "other", example(3), SHAPES, KEEP)

    def fresh(self, kind: str) -> Path:
        self.copies += 1
        folder = self.root / f"copy-{self.copies}" / "checkpoints"
        shutil.copytree(self.root / kind, folder)
        (folder.parent / "other").symlink_to(self.root / "other")
        return folder

    def drop(self, folder: Path) -> None:
        shutil.rmtree(folder.parent)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def points(server: Server, folders: Folders, job: Prepare, kind: str) -> list[tuple[str, int]]:
    """Every system call of a job that may touch a file, as its name and its how-manieth of that name it is."""
    folder = folders.fresh(kind)
    log = folder.parent / "trace"
    assert server.traced(job, folder, "-o", str(log)) == 0
    counts = Counter(re.findall(r"^(\w+)\(", log.read_text(), re.MULTILINE))
    folders.drop(folder)
    return [(call, turn) for call, count in counts.items() if call not in HARMLESS for turn in range(1, count + 1)]


def assert_saves_go_on(folder: Path) -> None:
    """After any accident the next save works, and leaves nothing of it behind."""
    save(folder, example(4), SHAPES, KEEP)
    assert restored_round(folder) == 4
    assert len(list(folder.iterdir())) == KEEP


def test_a_save_killed_at_every_system_call(tracing: Server, folders: Folders) -> None:
    everywhere = points(tracing, folders, save_once, "pair")
    restored: Counter[int] = Counter()
    for call, turn in everywhere:
        folder = folders.fresh("pair")
        code = tracing.traced(save_once, folder, "-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={turn}")
        assert code == -signal.SIGKILL, (call, turn)
        restored[restored_round(folder)] += 1
        assert {len(list(path.iterdir())) for path in folder.iterdir() if path.name[0] != "."} == {FILES}, (call, turn)
        assert_saves_go_on(folder)
        folders.drop(folder)
    print(f"{len(everywhere)} points, restored rounds {dict(restored)}")
    assert len(everywhere) >= POINTS_AT_LEAST
    assert set(restored) == {2, 3}


def test_control_an_overwrite_killed_at_every_system_call(tracing: Server, folders: Folders) -> None:
    everywhere, lost = points(tracing, folders, overwrite_once, "single"), 0
    for call, turn in everywhere:
        folder = folders.fresh("single")
        tracing.traced(overwrite_once, folder, "-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={turn}")
        lost += is_lost(folder)
        folders.drop(folder)
    print(f"control: {lost} of {len(everywhere)} points lost everything")
    assert lost >= len(everywhere) / 2


def test_everything_is_synced_before_it_gets_its_name(tracing: Server, folders: Folders) -> None:
    """A kill leaves the page cache alone; what a power cut leaves is decided by this order."""
    folder = folders.fresh("pair")
    log = folder.parent / "trace"
    assert tracing.traced(save_once, folder, "-y", "-o", str(log), "-e", "trace=openat,fsync,rename") == 0
    lines = log.read_text().splitlines()
    renamed = next(place for place, line in enumerate(lines) if line.startswith("rename("))
    created = re.findall(r'"([^"]+)", [^"]*O_CREAT', "\n".join(lines[:renamed]))
    synced = [re.findall(r"fsync\(\d+<(.+)>\)", "\n".join(part)) for part in (lines[:renamed], lines[renamed:])]
    assert len(created) == FILES
    assert synced == [[*created, str(Path(created[0]).parent)], [str(folder)]]


def test_a_save_failed_by_the_disk_at_every_call(tracing: Server, folders: Folders) -> None:
    """Each call fails once: the save says so, what was there stays, and saves work again when there is room."""
    errors = FULL | BROKEN
    failing = [(call, turn) for call, turn in points(tracing, folders, save_once, "pair") if call in errors]
    for call, turn in failing:
        folder = folders.fresh("pair")
        fault = f"inject={call}:error={errors[call]}:when={turn}"
        code = tracing.traced(save_once, folder, "-o", "/dev/null", "-e", fault)
        assert code == StorageError.exit_code, (call, turn)
        assert restored_round(folder) in (2, 3), (call, turn)
        assert_saves_go_on(folder)
        folders.drop(folder)
    assert {"write", "fsync", "rename"} <= {call for call, _ in failing}


@pytest.mark.parametrize("seed", [200])
def test_saves_killed_at_random_moments(server: Server, folders: Folders, seed: int) -> None:
    """200 kills: whatever was reported saved is restored, or something newer; at most the save under way is lost."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    unfinished = 0
    for turn in range(200):
        folder = folders.fresh("pair")
        code = server.killed_after(save_for_ever, folder, rng.uniform(0.0, 0.02))
        assert code == -signal.SIGKILL
        last, round_number = last_done(folder), restored_round(folder)
        assert round_number in (last, last + 1), (seed, turn, last, round_number)
        unfinished += any(path.name.startswith(".") for path in folder.iterdir())
        folders.drop(folder)
    print(f"{unfinished} of 200 kills fell into a save")
    assert unfinished >= 50


def last_done(folder: Path) -> int:
    done = folder.parent / "done"
    return int(["2", *(done.read_text().split() if done.exists() else [])][-1])


@pytest.mark.parametrize("seed", [201])
def test_control_overwrites_killed_at_random_moments(server: Server, folders: Folders, seed: int) -> None:
    rng, lost = random.Random(seed), 0
    for _ in range(60):
        folder = folders.fresh("single")
        server.killed_after(overwrite_for_ever, folder, rng.uniform(0.005, 0.02))
        lost += is_lost(folder)
        folders.drop(folder)
    print(f"control, seed {seed}: {lost} of 60 kills lost everything")
    assert lost >= 30


if __name__ == "__main__":
    serve()
