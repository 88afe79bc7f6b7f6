"""Kill processes of an exact pipeline again and again, and compare its weights with those of one process, bit for bit.

    python -m benchmarks.exact [RUN.toml] [--steps 20] [--kills 30] [--nodes 0.2] [--seed 0] [--json]

Runs four real peers with `murmur up`. `--kills` times in the first `--steps` rounds it kills a random process: a
trainer, or with the probability `--nodes` a whole peer, which `murmur up` restarts once. Meanwhile some answers and
outcomes are lost, and some tasks come twice. Some more rounds make up for those that were void.

- `exact`: `kills`, `steps` that counted, and whether the weights of all stages are `bit_equal`.
- `control`: the same comparison after a short run whose trainers add every gradient that they compute, as servers
  without a ledger do; it must find a difference.

Exit code 1 unless `exact` is equal over so many kills and steps, and `control` is not.
"""

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.pipelining.exact_reference import SingleProcess, read_stages
from node.injected_faults import VARIABLE
from node.processes.process import python_environment
from protocol.manifest.reading import load_manifest

RUN = Path(__file__).parent.parent / "tests" / "swarm" / "stages" / "exact.toml"
PEERS = 4
POLL_SECONDS = 0.2
DELAY_SECONDS = 2.0  # from the moment when a kill is due to the kill, at most, so that it comes at any point of a step
SPARE_ROUNDS = 6  # beside one for each step, for void rounds
FAULTS = "answers=drop:31,outcomes=drop:29,tasks=copy:23"
ROUND_LINE = re.compile(r" round (\d+): ")


@dataclass(frozen=True)
class Result:
    """`kills`: by SIGKILL; `steps`: that counted, of `rounds`; `differing`: values of all peers' weights."""

    kills: int
    killed_nodes: int
    rounds: int
    steps: int
    void_rounds: int
    differing: int
    bit_equal: bool
    seconds: float


def children_of(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def is_trainer(pid: int) -> bool:
    return "node.trainer" in command_of(pid)


def peer_of(pid: int) -> str:
    """Return the name of the peer whose node a process is."""
    found = re.search(r"peer-\d+", command_of(pid))
    return found[0] if found else ""


class Killer:
    """Kills `most` processes below `murmur up`, evenly spread over a number of rounds, as a seed says."""

    def __init__(self, up: int, most: int, rounds: int, node_share: float, seed: int) -> None:
        self._up = up
        self._most = most
        self._rounds = rounds
        self._node_share = node_share
        self._chance = random.Random(seed)
        self._at = 0.0
        self.kills = 0
        self.killed_nodes: set[str] = set()  # each at most once: `murmur up` restarts no peer twice

    def watch(self, rounds: int, now: float) -> None:
        """Kill a process if fewer were killed than after so many rounds."""
        if self.kills < min(self._most, math.ceil(self._most * rounds / self._rounds)) and now >= self._at:
            self._strike()
            self._at = now + DELAY_SECONDS * self._chance.random()

    def _strike(self) -> None:
        nodes = [pid for pid in children_of(self._up) if any(map(is_trainer, children_of(pid)))]
        if not nodes:
            return
        node = self._chance.choice(nodes)
        is_chosen = self._chance.random() < self._node_share
        kills_node = is_chosen and len(nodes) == PEERS and peer_of(node) not in self.killed_nodes
        victim = node if kills_node else next(filter(is_trainer, children_of(node)), None)
        if victim is not None:
            self.killed_nodes |= {peer_of(node)} if kills_node else set()
            os.kill(victim, signal.SIGKILL)
            self.kills += 1


def rounds_made(folder: Path) -> int:
    """Return the highest round that a peer has logged."""
    lines = (line for log in folder.glob("peer-*/log") for line in log.open(errors="replace"))
    return max((int(found[1]) for line in lines if (found := ROUND_LINE.search(line))), default=0)


@dataclass(frozen=True)
class Plan:
    """A run in which a number of processes are killed within a number of steps; then come `spare` rounds."""

    name: str
    steps: int
    kills: int
    spare: int
    faults: str


CONTROL = Plan("control", steps=4, kills=4, spare=0, faults=f"{FAULTS},adds=always")


def run_swarm(plan: Plan, folder: Path, given: argparse.Namespace) -> Killer:
    """Run all peers to the end, and kill processes meanwhile."""
    words = ["--peers", str(PEERS), "--rounds", str(plan.steps + plan.spare), "--json"]
    command = [sys.executable, "-m", "node.cli", "up", str(given.run), "--dir", str(folder), *words]
    environment = {**python_environment(), VARIABLE: plan.faults}
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        up = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    killer = Killer(up.pid, plan.kills, plan.steps, given.nodes, given.seed)
    try:
        while up.poll() is None:
            time.sleep(POLL_SECONDS)
            killer.watch(rounds_made(folder), time.monotonic())
    finally:
        up.terminate()
        up.wait(60)
    return killer


def compare(folder: Path) -> tuple[int, int]:
    """Return the steps that counted, and the values that differ from one process."""
    stages, manifest = read_stages(folder), load_manifest(folder / "run.toml")
    newest = max(stage.steps for stage in stages)
    weights = SingleProcess(manifest, folder).run(newest)
    finished = [stage for stage in stages if stage.steps == newest]
    differing = sum(int((stage.anchor != weights[stage.stage]).sum()) for stage in finished)
    if {stage.stage for stage in finished} != set(range(manifest.pipeline.stages)):
        differing += sum(each.numel() for each in weights)  # a stage has not finished
    return newest, differing


def measure(plan: Plan, given: argparse.Namespace) -> Result:
    """Run a swarm and compare its weights."""
    began = time.monotonic()
    with nullcontext(given.dir) if given.dir else tempfile.TemporaryDirectory(prefix="murmur-exact-") as base:
        folder = Path(base) / plan.name
        killer = run_swarm(plan, folder, given)
        rounds, (steps, differing) = rounds_made(folder), compare(folder)
    return Result(
        kills=killer.kills,
        killed_nodes=len(killer.killed_nodes),
        rounds=rounds,
        steps=steps,
        void_rounds=rounds - steps,
        differing=differing,
        bit_equal=differing == 0,
        seconds=round(time.monotonic() - began, 1),
    )


def missed(exact: Result, control: Result, given: argparse.Namespace) -> list[str]:
    """Return a line for each figure that misses its target."""
    lines = [] if exact.bit_equal else [f"exact.differing is {exact.differing}, not 0"]
    if exact.kills < given.kills or exact.steps < given.steps:
        lines.append(f"{exact.kills} kills in {exact.steps} steps, not {given.kills} in {given.steps}")
    return lines if not control.bit_equal else [*lines, "control.bit_equal: the comparison finds no difference"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=RUN)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--nodes", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keep the folders of the runs here")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    control = measure(CONTROL, given)
    exact = measure(Plan("exact", given.steps, given.kills, SPARE_ROUNDS, FAULTS), given)
    misses = missed(exact, control, given)
    report = {"exact": asdict(exact), "control": asdict(control), "missed": misses}
    print(json.dumps(report, indent=1) if given.json else f"{exact}\ncontrol: {control}")
    sys.stderr.writelines(f"missed: {line}\n" for line in misses)
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
