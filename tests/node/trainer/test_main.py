"""The trainer as a real process: it learns, sends, adopts, comes back from memory, and keeps to itself."""

import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import torch

from node.processes.process import TRAINER_NICENESS
from node.trainer.counters import Counters
from node.trainer.ipc.channel import (
    AnchorApplied,
    ApplyAnchor,
    ContributionHeader,
    Evaluate,
    Evaluated,
    Ready,
    RevisedOutcome,
    RowsSkipped,
    Snapshotted,
    TakeSnapshot,
    TrainerProgress,
    TrainerWarning,
)
from node.trainer.ipc.shared_memory import Snapshot
from optim.compose import compose
from protocol.blobs.blob import Blob
from protocol.errors import DataError, MurmurError
from tests.node.trainer.process_harness import DEADLINE, ProcessHarness
from tests.slices import nightly
from tests.swarm.processes import open_shared_memory

pytestmark = pytest.mark.slow

Make = Callable[..., ProcessHarness]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[ProcessHarness] = []

    def build(**options: object) -> ProcessHarness:
        made.append(ProcessHarness(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for bench in made:
        await bench.close()


def snapshot(bench: ProcessHarness) -> tuple[Snapshot, Counters]:
    copied = bench.arena.copy_snapshot()
    assert copied is not None
    return copied[0], Counters.model_validate(copied[0].meta)


def decoded(bench: ProcessHarness, message: ContributionHeader) -> torch.Tensor:
    plan, pieces, start = bench.program.plan(message.round), [], 0
    for codec, size, (first, last) in zip(plan.codecs, message.sizes, plan.part_spans, strict=True):
        pieces.append(codec.decode(bytes(bench.arena.contribution_buffer[start : start + size]), last - first))
        start += size
    return torch.cat(pieces)


async def test_the_loss_falls_and_everything_is_counted(make: Make) -> None:
    bench = make(recipe="diloco", inner_steps=100)
    await bench.trainer.start()
    ready = await bench.until(Ready)
    assert (ready.step, ready.round, ready.outstanding, ready.device) == (0, 0, None, "cpu")
    await bench.trainer.send(Evaluate(round=0))
    before = await bench.until(Evaluated)
    message = await bench.until(ContributionHeader)
    assert (message.round, message.steps, message.tokens) == (0, 100, 6400)
    assert message.loss < before.loss < 5.7
    bench.arena.anchor(1).copy_(bench.arena.anchor(0) - decoded(bench, message))
    await bench.trainer.send(ApplyAnchor(round=1, outcome="included"))
    assert (await bench.until(AnchorApplied)).round == 1
    await bench.trainer.send(Evaluate(round=1))
    after = await bench.until(Evaluated)
    assert after.loss < before.loss - 0.1 and after.tokens <= 512
    progress = await bench.until(TrainerProgress)
    assert progress.tokens == 64 * progress.step and progress.loss < before.loss
    assert progress.seconds["compute"] > 0 and {"encode", "adopt", "evaluate", "snapshot"} <= set(progress.seconds)
    assert await bench.trainer.send(TakeSnapshot())
    assert (await bench.until(Snapshotted)).step >= progress.step


async def test_the_processors_are_the_daemons_first(make: Make) -> None:
    bench = make(recipe="diloco", inner_steps=100)
    await bench.trainer.start()
    await bench.until(TrainerProgress)
    trainer = psutil.Process(bench.trainer.pid)
    threads = [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in trainer.threads()]
    assert set(threads) == {psutil.Process().nice() + TRAINER_NICENESS}


async def step_now(bench: ProcessHarness) -> int:
    await bench.trainer.send(TakeSnapshot())
    return (await bench.until(Snapshotted)).step


@pytest.mark.parametrize(("ahead", "last_step"), [(0, 10), (4, 14), *nightly([(10, 20)])])
async def test_a_message_on_its_way_holds_training_only_so_far(make: Make, ahead: int, last_step: int) -> None:
    bench = make(inner_steps=10, ahead=ahead)
    await bench.trainer.start()
    assert (await bench.until(ContributionHeader)).steps == 10
    bench.seen.clear()
    while await step_now(bench) < last_step:
        pass
    assert [await step_now(bench) for _ in range(5)] == [last_step] * 5
    assert not any(isinstance(message, ContributionHeader) for message in bench.seen)
    await bench.trainer.send(ApplyAnchor(round=0, outcome="included"))
    following = await bench.until(ContributionHeader)
    assert following.steps == 10
    await step_now(bench)
    assert snapshot(bench)[1].seconds["wait"] > 0


async def test_a_result_waits_for_its_step_and_a_fate_is_not_lost_on_the_way(make: Make) -> None:
    """Told at once, an anchor is taken `delay` steps after the message; one that follows before that replaces it."""
    bench = make(inner_steps=10, ahead=200, delay=200)
    await bench.trainer.start()
    await bench.until(ContributionHeader)
    bench.arena.anchor(1).copy_(bench.arena.anchor(0))
    await bench.trainer.send(ApplyAnchor(round=1, outcome="included"))
    await bench.trainer.send(ApplyAnchor(round=2, outcome="none"))
    assert (await bench.until(AnchorApplied)).round == 2
    counters = snapshot(bench)[1]
    assert counters.step >= 210, "before its step it was not to be taken"
    message = await bench.until(ContributionHeader)
    assert (message.round, message.steps) == (2, 200), "it is free to send again, and counts what came after the first"


async def test_excluded_message_is_in_the_residual_again_and_counts_again(make: Make) -> None:
    bench = make(inner_steps=10, ahead=0)
    await bench.trainer.start()
    first = await bench.until(ContributionHeader)
    sent = decoded(bench, first)
    before = snapshot(bench)[0].vectors
    bench.arena.anchor(1).copy_(bench.arena.anchor(0) + 0.01)
    await bench.trainer.send(ApplyAnchor(round=1, outcome="excluded"))
    await bench.until(AnchorApplied)
    again = await bench.until(ContributionHeader)
    assert (again.round, again.steps, again.tokens) == (1, 20, 1280)
    after, counters = snapshot(bench)
    # What left the anchors and what stayed behind add up to all that was trained: residual + sent + progress.
    decay = compose("sparseloco", {}).feedback.decay
    progress = bench.arena.anchor(1) - after.vectors["weights"]
    total = decoded(bench, again) + after.vectors["residual"]
    torch.testing.assert_close(total, decay * (before["residual"] + sent) + progress, atol=1e-6, rtol=1e-5)
    assert counters.outstanding is not None and counters.outstanding.round == 1


async def test_a_message_that_another_chain_has_is_taken_out_again(make: Make, tmp_path: Path) -> None:
    bench = make(inner_steps=10, ahead=0, blobs=str(tmp_path))
    await bench.trainer.start()
    message = await bench.until(ContributionHeader)
    payload, vectors = bytes(bench.arena.contribution_buffer[: sum(message.sizes)]), snapshot(bench)[0].vectors
    name = Blob.of(payload).name
    (tmp_path / name).write_bytes(payload)
    included = RevisedOutcome(header=message, parts=(name,), outcome="included")
    await bench.trainer.send(ApplyAnchor(round=1, outcome="excluded", revised=(included,)))
    await bench.until(AnchorApplied)
    torch.testing.assert_close(snapshot(bench)[0].vectors["residual"], vectors["residual"], atol=1e-7, rtol=1e-5)
    again = await bench.until(ContributionHeader)
    (tmp_path / name).write_bytes(bytes(len(payload)))
    await bench.trainer.send(
        ApplyAnchor(round=2, outcome="included", revised=(included.model_copy(update={"fate": "lost"}),))
    )
    await bench.until(AnchorApplied)
    before = snapshot(bench)[0].vectors["residual"]
    await bench.trainer.send(
        ApplyAnchor(round=3, outcome="none", revised=(included.model_copy(update={"fate": "excluded"}),))
    )
    await bench.until(AnchorApplied)
    assert torch.equal(snapshot(bench)[0].vectors["residual"], before), "nothing is taken from a damaged file"
    assert again.steps == 10, "and what it had counted counts no more"


@pytest.mark.parametrize("mode", ["normal", "small"])
async def test_a_killed_trainer_comes_back_from_memory(make: Make, mode: str) -> None:
    bench = make(inner_steps=30, ahead=0, memory_mode=mode)
    await bench.trainer.start()
    message = await bench.until(ContributionHeader)
    kept, counters = snapshot(bench)
    pid = bench.trainer.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    ready = await bench.until(Ready)
    assert (ready.step, ready.round, ready.outstanding) == (counters.step, 0, 0)
    assert bench.trainer.pid != pid and bench.trainer.crash_count == 1
    assert await bench.until(ContributionHeader) == message, "the message on its way is told again"
    assert message.loss < 5.5 and await step_now(bench) == counters.step
    now, after = snapshot(bench)
    for name in kept.vectors:
        assert torch.equal(now.vectors[name], kept.vectors[name]), name
    assert after.position == counters.position > 0


async def test_a_life_cut_short_trains_the_same_as_a_whole_one(make: Make, tmp_path: Path) -> None:
    """Killed at any time, it takes the same steps on the same text: equal weights to the bit at the same step."""
    results = []
    for name, kill in (("whole", False), ("cut", True)):
        (tmp_path / name).mkdir()
        bench = ProcessHarness(tmp_path / name, inner_steps=60, ahead=0)
        try:
            await bench.trainer.start()
            await bench.until(Ready)
            if kill:
                step = await step_now(bench)
                assert 0 <= step < 60 and bench.trainer.pid is not None
                os.kill(bench.trainer.pid, signal.SIGKILL)
                assert (await bench.until(Ready)).step >= step
            await bench.until(ContributionHeader)
            results.append(snapshot(bench)[0].vectors)
        finally:
            await bench.close()
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


async def test_it_holds_no_socket_but_the_channel_and_no_named_memory(make: Make) -> None:
    bench = make()
    await bench.trainer.start()
    await bench.until(TrainerProgress)
    process = psutil.Process(bench.trainer.pid)
    assert process.net_connections("inet") == []
    links = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
    assert sum(link.startswith("socket:") for link in links) == 1
    assert sum("memfd:murmur" in link for link in links) >= 1
    assert process.children() == []
    assert open_shared_memory([process]) == set()


async def test_ctrl_c_is_the_daemons_to_decide(make: Make) -> None:
    bench = make(inner_steps=1000)
    await bench.trainer.start()
    await bench.until(Ready)
    pid = bench.trainer.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    step = await step_now(bench)
    while await step_now(bench) <= step:
        pass
    assert bench.trainer.pid == pid and bench.trainer.crash_count == 0


async def test_unusable_text_files_are_reported_and_the_trainer_continues(make: Make) -> None:
    bench = make()
    for index in range(10):
        (bench.folder / f"more-{index}.txt").write_text("some more words\n" * 20)
    (bench.folder / "latin.txt").write_bytes(b"caf\xe9")
    await bench.trainer.start()
    skipped = await bench.until(RowsSkipped)
    assert skipped.counts == {"bad UTF-8": 1} and "latin.txt: not UTF-8 (byte 3)" in skipped.lines[0]
    await bench.until(TrainerProgress)


async def test_text_that_is_missing_ends_it_with_one_line(make: Make) -> None:
    bench = make()
    for path in bench.folder.glob("*.txt"):
        path.write_bytes(b"\xff\xfe")
    await bench.trainer.start()
    with pytest.raises(DataError, match="not UTF-8"):
        await bench.until(Ready)
    assert bench.trainer.crash_count == 0, "starting it again would not help"


async def test_a_loss_that_is_not_finite_is_left_out_and_then_ends_it(make: Make) -> None:
    bench = make()
    bench.arena.anchor(0).fill_(math.nan)
    await bench.trainer.start()
    with pytest.raises(MurmurError, match=r"20 steps in a row; lower train\.learning_rate"):
        await bench.until(TrainerProgress)
    told = [message.reason for message in bench.seen if isinstance(message, TrainerWarning)]
    assert told == 20 * ["step skipped"]


def test_it_dies_with_its_daemon(tmp_path: Path) -> None:
    """A daemon that is killed leaves no trainer behind, even one that hangs and does not look at its channel."""
    script = (
        "import os, socket, subprocess, sys, time\n"
        "ours, theirs = socket.socketpair()\n"
        "child = subprocess.Popen([sys.executable, '-c',\n"
        "  'import sys, time; from node.trainer.__main__ import die_with_parent; die_with_parent(int(sys.argv[1])); '\n"
        "  'print(1, flush=True); time.sleep(600)', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    daemon = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert daemon.stdout is not None
    lines = {int(daemon.stdout.readline()), int(daemon.stdout.readline())}
    trainer = psutil.Process(max(lines))
    daemon.kill()
    daemon.wait()
    daemon.stdout.close()
    gone, alive = psutil.wait_procs([trainer], timeout=DEADLINE)
    assert not alive


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    done = subprocess.run([sys.executable, "-m", "node.trainer", "0", "0", "1"], timeout=DEADLINE, check=False)
    assert done.returncode == 0


def test_a_daemon_that_hangs_up_ends_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "node.trainer", str(os.getpid()), str(theirs.fileno()), "0"],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        ours.close()
        assert trainer.wait(DEADLINE) == 0


def test_trainer_imports_no_server() -> None:
    """The trainer's process opens no socket to others, and starts sooner without a web server and gRPC."""
    program = """if True:
        import ast, importlib, sys
        import node.trainer.__main__ as entry
        source = ast.parse(open(entry.__file__).read())
        for statement in ast.walk(source):
            if isinstance(statement, ast.ImportFrom):
                importlib.import_module(statement.module)
        assert "node.trainer.loop" in sys.modules
        print(*{name.split(".")[0] for name in sys.modules})
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not set(result.stdout.split()) & {"starlette", "uvicorn", "grpc", "prometheus_client", "typer"}
