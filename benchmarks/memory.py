"""The memory of a peer, daemon and trainer together: bytes a parameter by recipe and phase.

    python benchmarks/memory.py [RECIPE ...] [--small | --both] [--millions 25] [--json]
    python benchmarks/memory.py --alone [--small] --millions 500

For each recipe one real peer trains a model with few FLOPs a parameter, a second one joins it, and `murmur export`
reads the first one's folder while both train. A thread reads /proc of daemon and trainer all the time. Counted are the
anonymous pages of both and the memory that they share, whether it was touched or not. (Files that are mapped are the
libraries, which all processes share, and files of vectors that only rounds use, which are listed apart: their pages are
on disk, and the system drops them when it needs room. With `--memory-mode small` there are more of these vectors.) The
same run with a tiny model gives
the bytes of Python, torch and the libraries, which are subtracted.

    start        until the first step
    steps        the usual amount (median) while there is no checkpoint to write
    round        the most in that time: contribution, sums, outer step, new anchor
    checkpoint   the most while one is written
    join         the most at the newcomer until it has contributed: it fetches the state of the other
    serve        the most at the other one meanwhile
    export       the most at the first peer, with the exporting process

`--alone`: one peer makes two rounds, as large as this machine holds; it is ended before others run out of memory.

Takes about a minute a recipe on two cores that do nothing else. Exit code 1 where a peak of all processes is above the
bound of BOUNDS; recipes with more vectors than `frugal` need more (docs/results/memory.md).
"""

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from node.commands.up.peer_process import PeerProcess
from node.from_manifest import build_program
from node.monitoring.status import NodeStatus
from protocol.manifest.reading import load_manifest

SAMPLE_SECONDS = 0.03
WAIT_SECONDS = 240.0
MEMFD = "/memfd:murmur"
BOUNDS = {"normal": 40, "small": 20}  # bytes a parameter
VECTORS_FILE = ".vectors-"
TINY_MILLIONS = 0.05
ALONE_ROUNDS, ALONE_SECONDS, LEAST_AVAILABLE = 2, 2000.0, 1.5e9
SHORT_TEXT = 'source = "python-stdlib"', 'source = "text"\npath = "*.txt"\nvalidation_share = 0.1'
TEXT_FILES, TEXT_CHARACTERS = 30, 400
ROUNDS = 3  # before the newcomer comes
PHASES = ("start", "steps", "round", "checkpoint", "join", "serve", "export")
RECIPES = ("frugal", "sparseloco", "averaging", "diloco", "data-parallel")
MANIFEST = """
[run]
name = "memory"
min_peers = 1
[model]
vocabulary = 256
width = {width}
layers = {layers}
heads = 8
hidden = {hidden}
context = 16
[data]
source = "python-stdlib"
[train]
batch_tokens = 16
microbatch = 1
learning_rate = 1e-4
[method]
recipe = "{recipe}"
[method.schedule]
{schedule}
[checkpoint]
keep = 1
[round]
grace = 2.0
leader_timeout = 5.0
exchange_timeout = 60.0
[membership]
heartbeat = 0.5
expiry = 8.0
"""


@dataclass(frozen=True)
class Use:
    """The bytes of one peer at one moment."""

    daemon: int = 0
    trainer: int = 0
    shared: int = 0
    other: int = 0  # a process that exports
    file: int = 0  # on disk, and not in the total

    @property
    def total(self) -> int:
        return self.daemon + self.trainer + self.shared + self.other

    def __sub__(self, base: "Use") -> "Use":
        return Use(
            self.daemon - base.daemon,
            self.trainer - base.trainer,
            self.shared - base.shared,
            self.other - base.other,
            self.file - base.file,
        )


@dataclass
class Peak:
    """The samples of one phase of one peer."""

    samples: list[Use] = field(default_factory=list)

    def usual(self) -> Use:
        return sorted(self.samples, key=lambda use: use.total)[len(self.samples) // 2] if self.samples else Use()

    def most(self) -> Use:
        return max(self.samples, key=lambda use: use.total, default=Use())


class Sampler:
    """Samples the memory of peers in a thread, and files each sample under the phase of its peer."""

    def __init__(self) -> None:
        self.phases: dict[str, Peak] = {name: Peak() for name in PHASES}
        self.watched: dict[PeerProcess, str] = {}
        self.exporter: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            for peer, phase in list(self.watched.items()):
                with suppress(psutil.Error, OSError, ValueError):
                    self._file(peer, phase, measure(peer, self.exporter if phase == "export" else None))

    def _file(self, peer: PeerProcess, phase: str, use: Use) -> None:
        if phase != "round":
            self.phases[phase].samples.append(use)
        elif any((peer.folder / "checkpoints").glob(".*.round-*")):
            self.phases["checkpoint"].samples.append(use)
        else:
            self.phases["round"].samples.append(use)

    def uses(self) -> dict[str, Use]:
        peaks = {name: peak.most() for name, peak in self.phases.items()}
        if not self.phases["checkpoint"].samples:  # of a tiny model, too short to be seen
            peaks["checkpoint"] = peaks["round"]
        return {**peaks, "steps": self.phases["round"].usual()}


def measure(peer: PeerProcess, exporter: int | None = None) -> Use:
    """Measure the processes of a peer now."""
    pid = peer_pid(peer)
    children = psutil.Process(pid).children(recursive=True)
    trainers = [child.pid for child in children if "node.trainer" in child.cmdline()]
    return Use(
        daemon=own_bytes(pid),
        trainer=sum(map(own_bytes, trainers)),
        shared=open_file_bytes(pid, MEMFD),
        other=own_bytes(exporter) if exporter else 0,
        file=open_file_bytes(pid, VECTORS_FILE),
    )


def peer_pid(peer: PeerProcess) -> int:
    assert peer._process is not None
    return peer._process.pid


def own_bytes(pid: int) -> int:
    """Return the anonymous bytes of a process, without shared memory."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields["Anonymous"]


def open_file_bytes(pid: int, name: str) -> int:
    """Return the bytes of open files with this in their name, such as the memory that daemon and trainer share."""
    found: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if name in entry.readlink().as_posix():
                found[entry.stat().st_ino] = entry.stat().st_blocks * 512
    return sum(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--millions", type=float, default=25, help="parameters")
    parser.add_argument("--small", action="store_true", help="with --memory-mode small")
    parser.add_argument("--both", action="store_true", help="with both modes")
    parser.add_argument("--alone", action="store_true", help="one peer, two rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.alone:
        return train_alone(options.recipes[0], "small" if options.small else "normal", options.millions)
    modes = ["normal", "small"] if options.both else ["small" if options.small else "normal"]
    found, is_above = {}, False
    for recipe, mode in itertools.product(options.recipes, modes):
        name = recipe if mode == "normal" else f"{recipe}, {mode}"
        found[name] = per_parameter(recipe, mode, options.millions)
        is_above |= any(amounts["all"] > BOUNDS[mode] for amounts in found[name].values())
        print(f"  {name}: {found[name]}", file=sys.stderr, flush=True)
    print(json.dumps(found) if options.json else "\n".join(table(found)))
    return int(is_above)


def per_parameter(recipe: str, mode: str, millions: float) -> dict[str, dict[str, float]]:
    """Return by phase the bytes a parameter of daemon, trainer and shared memory."""
    observe(recipe, mode, TINY_MILLIONS)  # compiles the kernels, which takes memory once
    base, _ = observe(recipe, mode, TINY_MILLIONS)
    uses, numel = observe(recipe, mode, millions)
    return {phase: by_process(uses[phase] - base[phase], numel) for phase in PHASES}


def by_process(use: Use, numel: int) -> dict[str, float]:
    amounts = {
        "all": use.total,
        "daemon": use.daemon,
        "trainer": use.trainer,
        "shared": use.shared,
        "export": use.other,
        "file": use.file,
    }
    return {name: round(amount / numel, 1) for name, amount in amounts.items()}


def observe(recipe: str, mode: str, millions: float) -> tuple[Mapping[str, Use], int]:
    """Run the phases for one recipe; return the bytes by phase, and the number of parameters."""
    with tempfile.TemporaryDirectory(prefix="murmur-memory-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(manifest_text(recipe, millions))
        numel = build_program(load_manifest(folder / "run.toml")).numel
        first, second = (make_peer(folder, index, mode) for index in range(2))
        with Sampler() as sampler:
            try:
                play(sampler, first, second, folder)
            finally:
                first.kill()
                second.kill()
        return sampler.uses(), numel


def train_alone(recipe: str, mode: str, millions: float) -> int:
    """Train a large model for two rounds in one peer, and print its peak; 1 if it takes too much or does not get there.

    The peer is ended when less than LEAST_AVAILABLE bytes are left on the machine.
    """
    with tempfile.TemporaryDirectory(prefix="murmur-memory-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(manifest_text(recipe, millions).replace(*SHORT_TEXT))
        numel = build_program(load_manifest(folder / "run.toml")).numel
        write_text(folder)
        peer = make_peer(folder, 0, mode)
        print(f"{numel:,} parameters, {recipe}, memory mode {mode}", file=sys.stderr, flush=True)
        with Sampler() as sampler:
            peer.start(())
            sampler.watched[peer] = "round"
            began, left, status = time.monotonic(), 0, None
            try:
                while time.monotonic() - began < ALONE_SECONDS and peer.is_running:
                    asyncio.run(peer.poll())
                    left, status = psutil.virtual_memory().available, peer.status or status
                    if left < LEAST_AVAILABLE or status is not None and status.round >= ALONE_ROUNDS:
                        break
                    time.sleep(0.2)
            finally:
                peer.kill()
        tail = peer.log_tail(20)
        rounds, steps = (0, 0) if status is None else (status.round, status.step)
        uses = [use for phase in ("round", "checkpoint") for use in sampler.phases[phase].samples]
    most = max(uses, key=lambda use: use.total)
    print(f"{rounds} rounds, {steps} steps, {time.monotonic() - began:.0f} s, {left / 1e9:.1f} GB left on the machine")
    print(f"at most {most.total / 1e9:.1f} GB, {most.total / numel:.1f} bytes a parameter with Python: {most}")
    if rounds < ALONE_ROUNDS:
        print("\n".join(tail))
    return int(rounds < ALONE_ROUNDS or most.total > BOUNDS[mode] * numel)


def write_text(folder: Path) -> None:
    """Write a short text, of which so little is held out that a CPU evaluates a large model in seconds."""
    words = Path(__file__).parents[1].joinpath("ARCHITECTURE.md").read_text()
    for number in range(TEXT_FILES):
        piece = words[number * TEXT_CHARACTERS : (number + 1) * TEXT_CHARACTERS]
        (folder / f"{number}.txt").write_text(piece)


def play(sampler: Sampler, first: PeerProcess, second: PeerProcess, folder: Path) -> None:
    first.start(())
    sampler.watched[first] = "start"
    wait_for(first, lambda status: status.step > 0)
    sampler.watched[first] = "round"
    wait_for(first, lambda status: status.round >= ROUNDS)
    sampler.watched[first] = "serve"
    second.start(first.addresses())
    sampler.watched[second] = "join"
    wait_for(second, lambda status: status.contributions_included > 0)
    del sampler.watched[second]
    sampler.watched[first] = "export"
    command = [sys.executable, "-m", "node.cli", "export", str(first.folder), str(folder / "model")]
    exporting = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    sampler.exporter = exporting.pid
    if exporting.wait(WAIT_SECONDS):
        raise RuntimeError("murmur export failed")
    sampler.exporter = None


def manifest_text(recipe: str, millions: float) -> str:
    """Return the manifest of a model of about so many million parameters."""
    width = 64 if millions < 1 else 512 if millions < 60 else 1024 if millions < 700 else 2048
    hidden = width * 43 // 16
    layer = (4 * width * width + 3 * width * hidden) / 1e6
    steps = 1 if recipe in ("data-parallel", "qsdp", "demo") else 3
    ahead = "ahead = 3\n" if recipe == "frugal" else ""
    schedule = f"inner_steps = {steps}\n{ahead}"
    layers = max(1, round(millions / layer))
    return MANIFEST.format(width=width, hidden=hidden, layers=layers, recipe=recipe, schedule=schedule)


def make_peer(folder: Path, index: int, mode: str) -> PeerProcess:
    home = folder / f"peer-{index}"
    command = [sys.executable, "-P", "-m", "node.cli", "join", str(folder / "run.toml"), "--dir", str(home)]
    command += ["--name", home.name, "--threads", "1", "--memory-mode", mode, "--listen", "/ip4/127.0.0.1/tcp/0"]
    command += ["--disk", "100GB"]  # the bound is one of main memory
    return PeerProcess(home.name, home, command)


def wait_for(peer: PeerProcess, condition: Callable[[NodeStatus], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        asyncio.run(peer.poll())
        if peer.status is not None and condition(peer.status):
            return
        if not peer.is_running:
            break
        time.sleep(0.05)
    raise RuntimeError("\n".join(peer.log_tail(20)))


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    lines = ["| recipe | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for recipe, phases in found.items():
        figures = [
            f"{phases[name]['all']} ({phases[name]['daemon']}, {phases[name]['trainer']}, {phases[name]['shared']})"
            for name in PHASES
        ]
        lines.append(f"| {recipe} | " + " | ".join(figures) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
